"""What every transport does: right bytes or none, pins and ends in time; and which of them is used."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tests.server.transports.fake_agent import Fabric
from tests.server.transports.pair import Pair, pair
from tokenlake.config import ServerConfig
from tokenlake.errors import ConfigurationError, ProtocolRefused
from tokenlake.wire import Code, peer
from tokenlake_server.bulk.choice import Transports, open_transports
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.engines.arena import Arena
from tokenlake_server.nixl import agent
from tokenlake_server.nixl.agent import library

Make = Callable[[int, int, int], contextlib.AbstractContextManager[Pair]]

LOCAL, LOST, BAD = bytes([Code.LOCAL]), bytes([Code.LOST]), bytes([Code.BAD_CHECKSUM])
SIZES = [(1000, 5, 2), (3 << 20, 8, 2), (6 << 20, 4, 1)]
"""Bytes, number and shards of segments: several in a piece; two halves, with a part of a piece; several pieces each."""


@pytest.fixture(params=["tcp", "fake", pytest.param("nixl", marks=pytest.mark.rest)])
def made(request: pytest.FixtureRequest) -> Make:
    if request.param == "nixl" and library() is None:
        pytest.skip("NIXL is not installed (make install-nixl)")

    @contextlib.contextmanager
    def make(size: int, count: int, shards: int) -> Iterator[Pair]:
        fabric = Fabric() if request.param == "fake" else None
        with pair(size, count, shards, nixl=request.param != "tcp", fabric=fabric) as two:
            assert two.read_with_nixl() == (request.param != "tcp")
            yield two
            assert two.read_with_nixl() == (request.param != "tcp"), "it was read as it was meant to be"
            wait_until(lambda: two.owner.sent == two.owner.answered, "no segment is pinned")
            assert fabric is None or not fabric.released_early

    return make


@pytest.mark.parametrize(("size", "count", "shards"), SIZES)
def test_right_bytes(made: Make, size: int, count: int, shards: int) -> None:
    with made(size, count, shards) as two:
        for _ in range(3):
            done = two.fetch()
            assert done.codes == LOCAL * count
            assert done.checksums == b"".join(two.owner.held[key][1] for key in two.keys)
            assert (done.answered, done.held) == (True, b"")


@pytest.mark.parametrize(("size", "count", "shards"), SIZES)
def test_a_flipped_bit_at_the_owner(made: Make, size: int, count: int, shards: int) -> None:
    with made(size, count, shards) as two:
        two.owner.slot(2)[size - 1] ^= 1
        assert two.fetch().codes == LOCAL * 2 + BAD + LOCAL * (count - 3)


def test_segments_that_the_owner_lacks(made: Make) -> None:
    with made(1000, 4, 1) as two:
        del two.owner.held[two.keys[1]]
        assert two.fetch().codes == LOCAL + LOST + LOCAL * 2
        two.owner.held.clear()
        done = two.fetch()
        assert (done.codes, done.answered) == (LOST * 4, True)


def test_an_owner_that_does_not_answer(made: Make) -> None:
    with made(1000, 4, 1) as two:
        two.owner.answers = False
        done = two.end(two.start(answer_s=0.1))
        assert (done.codes, done.answered, done.held) == (LOST * 4, False, b"")


def test_an_abort(made: Make) -> None:
    with made(1000, 4, 1) as two:
        two.owner.answers, before = False, two.owner.asked
        fetch = two.start()
        wait_until(lambda: two.owner.asked > before, "it waits for the answer")
        two.abort(fetch)
        done = two.end(fetch)
        assert (done.codes, done.answered, done.held) == (LOST * 4, None, b"")
        two.owner.answers = True
        assert two.fetch().codes == LOCAL * 4


def test_many_fetches_at_a_time(made: Make) -> None:
    """Into the same slots, which get the same bytes."""
    with made(1 << 20, 8, 1) as two:
        fetches = [two.start() for _ in range(6)]
        for fetch in fetches:
            wait_until(lambda fetch=fetch: fetch in two.reader.done, "it has ended", LIMIT_S)  # type: ignore[misc]
        assert two.fetch().codes == LOCAL * 8


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
