from __future__ import annotations

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_client.engines.vllm.settings import EngineSettings, read_settings


def test_the_connectors_own_configuration_wins_over_the_environment() -> None:
    environ = {"TOKENLAKE_ENGINE_LOAD": "sync", "TOKENLAKE_ENGINE_SEGMENT_TOKENS": "512", "TOKENLAKE_MEMORY": "1GiB"}
    settings = read_settings({"load": "async", "socket": "/s"}, environ)
    assert (settings.load, settings.segment_tokens, settings.socket) == ("async", 512, "/s")


def test_without_settings_it_asks_where_a_daemon_listens_by_default() -> None:
    """Where that is depends on the daemon that runs: it is found with each connection."""
    assert read_settings({}, {}) == EngineSettings(socket="")
    assert read_settings({}, {"XDG_RUNTIME_DIR": "/run/user/1"}).socket == ""


def test_the_daemons_user_is_a_uid() -> None:
    assert read_settings({}, {"TOKENLAKE_ENGINE_DAEMON_UID": "997"}).daemon_uid == 997
    assert read_settings({"daemon_uid": None}, {}).daemon_uid is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sockt", "/s"),
        ("load", "later"),
        ("segment_tokens", 0),
        ("segment_tokens", "many"),
        ("match_ms", -1),
        ("daemon_uid", -1),
        ("daemon_uid", "root"),
        ("verify", "perhaps"),
        ("write_patience_s", -0.5),
    ],
)
def test_what_is_unknown_or_invalid_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        read_settings({name: value}, {})
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        read_settings({}, {f"TOKENLAKE_ENGINE_{name.upper()}": str(value)})
