"""The settings of a daemon: their sources and precedence, their errors, and settings that depend on each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from tests.rules.settings import CERTIFICATE, FIELDS, SECRET, load
from tokenlake.config import Peer, ServerConfig, kinds, load_config
from tokenlake.config.loading import ENGINE_SETTINGS
from tokenlake.config.setting import Setting, describe, read, settings_of, table_of
from tokenlake.errors import ConfigurationError
from tokenlake_client.engines.vllm.settings import EngineSettings

UID = 1000


def test_defaults_are_those_of_the_struct() -> None:
    settings = load()
    assert settings.config == ServerConfig()
    assert dict(settings.origin) == dict.fromkeys(FIELDS, "default")


def test_every_field_has_a_default_that_its_own_check_accepts() -> None:
    described = {field: value for field, value, _ in load().describe()}
    assert tuple(described) == FIELDS
    for field, value in described.items():
        if field not in ("tenants", "kv_events"):
            assert load(None, {f"TOKENLAKE_{field.upper()}": value}).config == ServerConfig()


def test_every_setting_has_a_meaning_and_a_reason() -> None:
    """Every setting has its meaning and the reason of its default."""
    assert set(FIELDS) == set(ServerConfig.__struct_fields__)
    for name, setting in settings_of(ServerConfig).items():
        for text in (setting.meaning, setting.why, setting.kind.expected):
            assert len(text) > 5, name
            assert not text.endswith("."), name
            assert "|" not in text, name


def test_another_table_of_settings() -> None:
    """Another table of settings is read and shown in the same way."""

    class Table(msgspec.Struct, frozen=True):
        size: Annotated[int, Meta(ge=1, le=9), Setting("number of things", why="small")] = 3
        pass_word: Annotated[kinds.Secrets, Setting("a secret", why="none", default="none", secret=True)] = ()

    given = [("size", "4", "file"), ("size", 5, "flag --size"), ("pass_word", SECRET, "file")]
    values, origin = read(Table, given)
    assert list(describe(Table(**values), origin)) == [("size", "5", "flag --size"), ("pass_word", "***", "file")]
    assert "| `size` | `3` | a whole number from 1 to 9 | number of things | small |\n" in table_of(Table)
    with pytest.raises(ConfigurationError, match=r"'pass_word' is '\*\*\*'") as caught:
        read(Table, [("pass_word", "hush", "file")])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "environ", "flag", "memory", "origin"),
    [
        (None, {}, None, 4 << 30, "default"),
        ("memory = '2MiB'", {}, None, 2 << 20, "file, line 1"),
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


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "source"),
    [
        ("node = 'a'\nlease_s = 0", {}, {}, "file, line 2"),
        (None, {"TOKENLAKE_LEASE_S": "soon"}, {}, "environment TOKENLAKE_LEASE_S"),
        (None, {}, {"lease_s": -1.0}, "flag --lease-s"),
        ("lease_s = 0", {"TOKENLAKE_LEASE_S": "5"}, {"lease_s": 6.0}, "file, line 1"),
    ],
)
def test_the_error_of_an_invalid_value(
    toml: str | None, environ: dict[str, str], flags: dict[str, object], source: str
) -> None:
    """An invalid value names field, value, expectation and source."""
    with pytest.raises(ConfigurationError) as caught:
        load(toml, environ, **flags)
    assert caught.value.field == "lease_s"
    assert caught.value.value in (0, "soon", -1.0)
    assert caught.value.expected == f"seconds from 0.1 to 3600 (set by {source})"
    assert "lease_s" in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "environ", "flags"),
    [
        ("sokcet = 1", {}, {}),
        ("[sokcet]\nx = 1", {}, {}),
        (None, {"TOKENLAKE_SOKCET": "1"}, {}),
        (None, {}, {"sokcet": 1}),
    ],
)
def test_an_unknown_setting_is_refused_with_the_closest_known(
    toml: str | None, environ: dict[str, str], flags: dict[str, object]
) -> None:
    with pytest.raises(ConfigurationError, match=r"['\[]sokcet['\]].*did you mean 'socket'") as caught:
        load(toml, environ, **flags)
    assert caught.value.field == "sokcet"


SERVICE = {
    "TOKENLAKE_SERVICE_HOST": "10.0.0.7",
    "TOKENLAKE_SERVICE_PORT": "7440",
    "TOKENLAKE_SERVICE_PORT_METRICS": "7441",
    "TOKENLAKE_PORT": "tcp://10.0.0.7:7440",
    "TOKENLAKE_PORT_7440_TCP": "tcp://10.0.0.7:7440",
    "TOKENLAKE_PORT_7440_TCP_PROTO": "tcp",
    "TOKENLAKE_PORT_7440_TCP_PORT": "7440",
    "TOKENLAKE_PORT_7440_TCP_ADDR": "10.0.0.7",
    "TOKENLAKE_DAEMON_SERVICE_HOST": "10.0.0.7",
    "TOKENLAKE_DAEMON_PORT": "udp://[::1]:7440",
    "TOKENLAKE_MEMORY_PORT_1_SCTP_ADDR": "10.0.0.7",
}


def test_variables_of_a_kubernetes_service() -> None:
    """Variables that Kubernetes adds for a service are no settings."""
    settings = load(None, SERVICE | {"TOKENLAKE_MEMORY": "2MiB"})
    assert settings.config.memory == 2 << 20
    assert settings.ignored == tuple(sorted(SERVICE))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TOKENLAKE_PORT", "7440"), ("TOKENLAKE_METRICS_PORT", "7441"), ("TOKENLAKE_PORT_TCP", "tcp"), ("TOKENLAKE_", "")],
)
def test_other_variables_are_taken_for_misspelt_settings(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"environment {variable}\\)"):
        load(None, {variable: value})


def message(toml: str | None = None, environ: dict[str, str] | None = None, /, **flags: object) -> str:
    """The text of the error that refuses these settings."""
    with pytest.raises(ConfigurationError) as caught:
        load(toml, environ, **flags)
    return str(caught.value)


@pytest.mark.parametrize("name", ["zzz", "eviction", "port"])
def test_an_unknown_setting_close_to_none(name: str) -> None:
    """An unknown setting close to none says where all are listed."""
    expected = f"unknown setting '{name}' (set by file, line 1): `tokenlake config show` lists the settings"
    assert message(f"{name} = 1") == expected


def test_the_settings_of_engines_are_those_of_the_connector() -> None:
    assert set(settings_of(EngineSettings)) - set(FIELDS) == set(ENGINE_SETTINGS)
    assert load(None, {"TOKENLAKE_ENGINE_SAVE": "false"}).config == load(None, {}).config
    for name in ENGINE_SETTINGS:
        text = message(f"node = 'a'\n{name} = 100")
        assert text.startswith(f"unknown setting '{name}' (set by file, line 2): it is a setting of engines")
        assert "100" not in text


BEHIND = "the setting 'memory' stands in a table [[{}]] (file, line 1): settings of the daemon"


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[section]\nmemory = '1GiB'", "unknown table [section] (set by file, line 1)"),
        ("[[tenants]]\nname = 'a'\nmemory = '1GiB'\n", BEHIND.format("tenants")),
        ("[[kv_events]]\nname = 'a'\nmemory = '1GiB'\n", BEHIND.format("kv_events")),
        *(
            (f"memory = '1{unit}'", f"the unit '{unit.strip()}' is not known, write KiB, MiB, GiB or TiB")
            for unit in ("GB", "G", "gib", " MiBs")
        ),
        ("memory = \n", "configuration file"),
        ("memory = \n", "(at line 1, column 10)"),
        ("huge_pages = yes", "texts and sizes need quotes"),
        ("memory = '1GiB'\nmemory = '2GiB'\n", "a setting is given twice"),
    ],
)
def test_the_text_of_an_error(toml: str, text: str) -> None:
    assert text in message(toml)


def test_an_error_in_a_file_names_file_and_line() -> None:
    def refused(text: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            load_config(toml_text=text, environ={}, flags={}, uid=UID, file="/etc/a.toml")
        return str(caught.value)

    broken = refused("node = 'a'\nmemory = 1GiB\n")
    assert "/etc/a.toml" in broken
    assert "line 2" in broken
    assert refused("node = 'a'\n\nlease_s = 0\n").endswith("(set by /etc/a.toml, line 3)")
    assert refused("node = 'a'\n[[ tenants ]]\nname = 'a'\n").endswith("(set by /etc/a.toml, line 2)")
    assert refused("'lease_s' = 0").endswith("(set by /etc/a.toml)")


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


@pytest.mark.parametrize(
    ("memory", "region", "count"),
    [
        ("1MiB", "1MiB", 1),
        ("100MiB", "64MiB", 2),
        ("1GiB", "64MiB", 16),
        ("4GiB", "64MiB", 64),
        ("16GiB", "256MiB", 64),
        ("64GiB", "1GiB", 64),
        ("512GiB", "1GiB", 512),
        ("1800GiB", "3600MiB", 512),
    ],
)
def test_the_size_of_a_region_follows_from_the_memory(memory: str, region: str, count: int) -> None:
    config = load(memory=memory).config
    assert (config.region_size, config.regions) == (load(memory=memory, region_size=region).config.region_size, count)


def test_huge_pages_need_regions_of_whole_pages() -> None:
    assert load(huge_pages=True).config.huge_pages
    with pytest.raises(ConfigurationError, match="region_size.*multiple of 2MiB"):
        load(huge_pages=True, region_size="3MiB")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("0.0.0.0:1", "IP addresses of this machine, each one of an interface"),
        ("[::]:1", "IP addresses of this machine, each one of an interface"),
        ("b.pool:1", "IP addresses of this machine, each one of an interface"),
        (",".join(f"127.0.0.1:{port}" for port in range(1, 10)), "at most 8"),
        ("10.0.0.1:1", "a loopback address"),
        ("127.0.0.1:0", "ports from 1"),
    ],
)
def test_addresses_for_bulk_connections_are_those_of_interfaces(address: str, reason: str) -> None:
    load(node="a", bulk_listen="127.0.0.2:1,[::1]:1")
    with pytest.raises(ConfigurationError, match=reason):
        load(node="a", bulk_listen=address)


def test_one_list_of_peers_serves_all_nodes() -> None:
    everyone = "a=127.0.0.1:1,b=127.0.0.1:2"
    first = load(node="a", listen="127.0.0.1:1", peers=everyone).config
    second = load(node="b", listen="127.0.0.1:2", peers=everyone).config
    assert first.peers == (Peer("b", "127.0.0.1", 2),)
    assert second.peers == (Peer("a", "127.0.0.1", 1),)


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        ("a=127.0.0.1:9", "at 127.0.0.1:9 .set by flag --peers., and 'listen' is 127.0.0.1:1: set 'advertise' to"),
        ("a=127.0.0.1:1/2GiB", "/4GiB, as memory says"),
        ("b=127.0.0.1:1", "gives 127.0.0.1:1 to node 'b' .*it is the 'listen' of this node, 'a': correct 'listen'"),
    ],
)
def test_an_entry_that_contradicts_this_node_is_refused(peers: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"peers.*{reason}"):
        load(node="a", listen="127.0.0.1:1", peers=peers)


def test_the_entry_of_this_node() -> None:
    """The entry of this node is the address that it advertises."""
    peers = "a=127.0.0.1:1,b=127.0.0.1:2"
    everywhere = {"node": "a", "listen": "0.0.0.0:1", **CERTIFICATE}
    assert load(**everywhere, peers=peers, advertise="127.0.0.1:1").config.peers == (Peer("b", "127.0.0.1", 2),)
    assert "set 'advertise' to 127.0.0.1:1" in message(**everywhere, peers=peers)
    assert "'advertise' is 127.0.0.1:3" in message(**everywhere, peers=peers, advertise="127.0.0.1:3")
    assert "it is the 'advertise' of this node" in message(**everywhere, peers=peers[14:], advertise="127.0.0.1:2")


def test_nixl_needs_a_trusted_fabric() -> None:
    assert load(transport="nixl", fabric="trusted").config.transport == "nixl"
    with pytest.raises(ConfigurationError, match="does not encrypt"):
        load(transport="nixl")
