"""The settings of the connector come from its configuration and the environment; each refusal names the setting."""

from __future__ import annotations

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.engines.vllm.settings import EngineSettings, read_settings


def test_the_configuration_wins_over_the_environment() -> None:
    environ = {"TOKENLAKE_ENGINE_SALT": "s", "TOKENLAKE_ENGINE_SEGMENT_TOKENS": "512", "TOKENLAKE_MEMORY": "1GiB"}
    settings = read_settings({"salt": "t", "socket": "/s"}, environ)
    assert (settings.salt, settings.segment_tokens, settings.socket) == ("t", 512, "/s")


def test_no_setting_is_required() -> None:
    assert read_settings({}, {}) == EngineSettings()
    assert read_settings({}, {"XDG_RUNTIME_DIR": "/run/user/1"}).socket == ""


def test_the_daemons_user_is_a_uid() -> None:
    assert read_settings({}, {"TOKENLAKE_ENGINE_DAEMON_UID": "997"}).daemon_uid == 997
    assert read_settings({"daemon_uid": None}, {}).daemon_uid is None


def test_the_deadlines_of_the_connections() -> None:
    assert read_settings({}, {}).deadlines == DEFAULT_DEADLINES
    settings = read_settings({"call_ms": 500, "fetch_ms": 1500}, {})
    assert settings.deadlines == Deadlines(call_s=0.5, fetch_s=1.5)
    patient = read_settings({"call_ms": 20000, "write_patience_s": 30}, {})
    assert patient.deadlines == Deadlines(connect_s=20.0, call_s=20.0, store_s=30.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sockt", "/s"),
        ("segment_tokens", 0),
        ("segment_tokens", "many"),
        ("match_ms", -1),
        ("call_ms", 0),
        ("fetch_ms", -1),
        ("daemon_uid", -1),
        ("daemon_uid", "root"),
        ("verify", "perhaps"),
        ("write_patience_s", -0.5),
    ],
)
def test_an_unknown_or_invalid_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'.*set by kv_connector_extra_config"):
        read_settings({name: value}, {})
    variable = f"TOKENLAKE_ENGINE_{name.upper()}"
    with pytest.raises(ConfigurationError, match=f"'{name}'.*set by environment {variable}"):
        read_settings({}, {variable: str(value)})


def test_a_misspelt_setting_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'socket'"):
        read_settings({"sokcet": "/s"}, {})


def test_a_misspelt_credential_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'credential'") as refused:
        read_settings({"credentail": "a token"}, {})
    assert "a token" not in str(refused.value)


def test_variables_of_a_kubernetes_service_are_ignored() -> None:
    environ = {
        "TOKENLAKE_ENGINE_SERVICE_HOST": "10.0.0.1",
        "TOKENLAKE_ENGINE_SERVICE_PORT": "8000",
        "TOKENLAKE_ENGINE_PORT": "tcp://10.0.0.1:8000",
        "TOKENLAKE_ENGINE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read_settings({}, environ) == EngineSettings()
