"""What the settings allow, and what this machine has."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tokenlake.config import ServerConfig
from tokenlake.errors import ConfigurationError, ProtocolRefused
from tokenlake.wire import peer
from tokenlake_server.bulk.choice import Transports, open_transports
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.engines.arena import Arena
from tokenlake_server.nixl import agent

SMALL: dict[str, Any] = {"memory": 1 << 20, "region_size": 1 << 20}


@pytest.mark.parametrize(
    "settings", [{"transport": "tcp", "fabric": "trusted"}, {"transport": "auto"}, {"fabric": "untrusted"}]
)
def test_nixl_is_not_loaded_where_it_is_not_allowed(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "library", lambda: pytest.fail("it looks for NIXL"))
    assert open_transports(ServerConfig(**SMALL, **settings), 1, Arena()).nixl is None


def test_a_machine_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "library", lambda: None)
    arena = Arena()
    assert open_transports(ServerConfig(**SMALL, fabric="trusted"), 1, arena).nixl is None
    with pytest.raises(ConfigurationError, match="NIXL is not installed"):
        open_transports(ServerConfig(**SMALL, fabric="trusted", transport="nixl"), 1, arena)
    assert not [name for name in sys.modules if name.startswith("nixl") and "_bindings" not in name]


def test_places_that_were_not_asked_for() -> None:
    transports = Transports(Tcp(Arena()))
    assert transports.offer("x") == ("", 0)
    with pytest.raises(ProtocolRefused, match="reads no memory"):
        transports.of(peer.Pulled(1, b"", b"", (), bytes(28)))
