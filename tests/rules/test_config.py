"""The settings of a daemon: sources, precedence, what they are together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.settings import FIELDS, load
from tokenlake import config as config_module
from tokenlake.config import Peer, ServerConfig, load_config
from tokenlake.errors import ConfigurationError

UID = 1000


def test_defaults_are_those_of_the_struct() -> None:
    settings = load()
    assert settings.config == ServerConfig()
    assert dict(settings.origin) == dict.fromkeys(FIELDS, "default")


def test_every_field_has_a_default_that_its_own_check_accepts() -> None:
    described = {field: value for field, value, _ in load().describe()}
    assert tuple(described) == FIELDS
    for field, value in described.items():
        if field != "tenants":
            assert load(None, {f"TOKENLAKE_{field.upper()}": value}).config == ServerConfig()


def test_every_default_has_its_reason_beside_it() -> None:
    source = Path(config_module.__file__).read_text()
    for field in FIELDS:
        assert re.search(rf"    # [^\n]+\n    {field}: ", source), field


@pytest.mark.parametrize(
    ("toml", "environ", "flag", "memory", "origin"),
    [
        (None, {}, None, 1 << 30, "default"),
        ("memory = '2MiB'", {}, None, 2 << 20, "file"),
        ("memory = '2MiB'", {"TOKENLAKE_MEMORY": "3MiB"}, None, 3 << 20, "environment TOKENLAKE_MEMORY"),
        ("memory = '2MiB'", {"TOKENLAKE_MEMORY": "3MiB"}, "4MiB", 4 << 20, "flag --memory"),
        ("memory = '2MiB'", {}, "4MiB", 4 << 20, "flag --memory"),
    ],
)
def test_the_stronger_source_wins(
    toml: str | None, environ: dict[str, str], flag: str | None, memory: int, origin: str
) -> None:
    settings = load(toml, environ, memory=flag)
    assert settings.config.memory == memory
    assert settings.origin["memory"] == origin


def test_variables_of_others_are_not_settings() -> None:
    assert load(None, {"PATH": "/bin", "TOKENLAKES": "1", "memory": "1"}).config == ServerConfig()


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "source"),
    [
        ("lease_s = 0", {}, {}, "file"),
        (None, {"TOKENLAKE_LEASE_S": "soon"}, {}, "environment TOKENLAKE_LEASE_S"),
        (None, {}, {"lease_s": -1.0}, "flag --lease-s"),
        ("lease_s = 0", {"TOKENLAKE_LEASE_S": "5"}, {"lease_s": 6.0}, "file"),
    ],
)
def test_an_invalid_value_names_field_value_expectation_and_source(
    toml: str | None, environ: dict[str, str], flags: dict[str, object], source: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(toml, environ, **flags)
    assert caught.value.field == "lease_s"
    assert caught.value.value in (0, "soon", -1.0)
    assert caught.value.expected == f"seconds from 0.1 to 3600 (set by {source})"
    assert "lease_s" in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "environ", "flags"),
    [
        ("memroy = 1", {}, {}),
        ("[memroy]\nx = 1", {}, {}),
        (None, {"TOKENLAKE_MEMROY": "1"}, {}),
        (None, {}, {"memroy": 1}),
    ],
)
def test_an_unknown_setting_is_refused_with_the_closest_known(
    toml: str | None, environ: dict[str, str], flags: dict[str, object]
) -> None:
    with pytest.raises(ConfigurationError, match=r"'memroy'.*did you mean 'memory'") as caught:
        load(toml, environ, **flags)
    assert caught.value.field == "memroy"


def test_an_unknown_setting_close_to_none_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match=", ".join(FIELDS[:3])):
        load("zzz = 1")


def test_a_file_that_is_not_toml_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="configuration file.*valid TOML"):
        load("memory = ")


@pytest.mark.parametrize(
    ("environ", "flags", "socket"),
    [
        ({}, {}, f"/tmp/tokenlake-{UID}/tokenlake-local.sock"),
        ({"XDG_RUNTIME_DIR": ""}, {"node": "a"}, f"/tmp/tokenlake-{UID}/tokenlake-a.sock"),
        ({"RUNTIME_DIRECTORY": "/run/tokenlake"}, {"node": "a"}, "/run/tokenlake/tokenlake-a.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, {"node": "a"}, "/run/user/7/tokenlake-a.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, {"socket": "/x.sock"}, "/x.sock"),
    ],
)
def test_the_default_socket_follows_user_and_node(
    environ: dict[str, str], flags: dict[str, object], socket: str
) -> None:
    assert load_config(toml_text=None, environ=environ, flags=flags, uid=UID).config.socket == socket


def test_a_default_socket_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="socket.*set by default"):
        load_config(toml_text=None, environ={"XDG_RUNTIME_DIR": "/run/" + "a" * 100}, flags={}, uid=UID)


def test_a_small_memory_has_a_region_of_its_size() -> None:
    assert load(memory="1MiB").config.region_size == 1 << 20
    assert load(memory="1TiB").config.region_size == ServerConfig().region_size


def test_huge_pages_need_regions_of_whole_pages() -> None:
    assert load(huge_pages=True).config.huge_pages
    with pytest.raises(ConfigurationError, match="region_size.*multiple of 2MiB"):
        load(huge_pages=True, region_size="3MiB")


def test_one_list_of_peers_serves_all_nodes() -> None:
    everyone = "a=127.0.0.1:1,b=127.0.0.1:2"
    first = load(node="a", listen="127.0.0.1:1", peers=everyone).config
    second = load(node="b", listen="127.0.0.1:2", peers=everyone).config
    assert first.peers == (Peer("b", "127.0.0.1", 2),)
    assert second.peers == (Peer("a", "127.0.0.1", 1),)


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        ("a=127.0.0.1:9", "a=127.0.0.1:1, as listen says"),
        ("a=127.0.0.1:1/2GiB", "/1GiB, as memory says"),
        ("b=127.0.0.1:1", "127.0.0.1:1 to be this node, a"),
    ],
)
def test_an_entry_that_contradicts_this_node_is_refused(peers: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"peers.*{reason}"):
        load(node="a", listen="127.0.0.1:1", peers=peers)


def test_a_configuration_does_not_change() -> None:
    config = ServerConfig()
    with pytest.raises(AttributeError):
        config.memory = 1  # type: ignore[misc]


def test_the_settings_of_engines_are_not_the_daemons() -> None:
    assert load(None, {"TOKENLAKE_ENGINE_LOAD": "sync"}).config == load(None, {}).config
