"""The settings of a daemon: sources, precedence, what is refused and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake import config as config_module
from tokenlake.config import (
    Address,
    Peer,
    ServerConfig,
    Settings,
    Tenant,
    format_size,
    load_config,
    parse_address,
    parse_size,
)
from tokenlake.errors import ConfigurationError

FIELDS = ServerConfig.__struct_fields__
SECRET = "00112233445566778899aabbccddeeff"


def load(toml: str | None = None, environ: Mapping[str, str] | None = None, /, **flags: Any) -> Settings:
    return load_config(toml_text=toml, environ=environ or {}, flags=flags)


def tenant(name: str = "a", **fields: object) -> str:
    """A table of `tenants` in TOML; a field given as None is left out."""
    values = {"name": name, "secret": SECRET, **fields}
    lines = [f"{key} = {value!r}" for key, value in values.items() if value is not None]
    return "\n".join(["[[tenants]]", *lines, ""])


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
    ("field", "value"),
    [
        ("node", ""),
        ("node", "a b"),
        ("node", "a" * 65),
        ("node", "a\n"),
        ("node", 3),
        ("memory", "64MB"),
        ("memory", "-1"),
        ("memory", 0),
        ("memory", True),
        ("memory", 1.5),
        ("memory", "1.5GiB"),
        ("memory", (1 << 20) + 1),
        ("memory", 1 << 60),
        ("socket", ""),
        ("socket", "/" + "a" * 107),
        ("socket", "/" + "\N{GREEK SMALL LETTER ALPHA}" * 60),
        ("listen", "127.0.0.1"),
        ("listen", "127.0.0.1:65536"),
        ("listen", "0.0.0.0:7440"),
        ("listen", "10.0.0.1:7440"),
        ("listen", "[::]:7440"),
        ("listen", "example.com:7440"),
        ("listen", ""),
        ("listen", 7440),
        ("metrics", "0.0.0.0:9090"),
        ("metrics", "127.0.0.1:7440"),
        ("region_size", "1KiB"),
        ("region_size", "2GiB"),
        ("lease_s", "nan"),
        ("lease_s", "inf"),
        ("lease_s", True),
        ("lease_s", 10**400),
        ("reservation_s", 3601),
        ("match_deadline_ms", 0.5),
        ("suspect_ms", 0),
        ("staged_share", 0),
        ("staged_share", 0.85),
        ("dirty_share", 1.01),
        ("session_lease_share", -0.1),
        ("session_reserve_share", "half"),
        ("max_sessions", 0),
        ("max_sessions", 2.0),
        ("max_sessions", False),
        ("max_frame", "1KiB"),
        ("run_length", -1),
        ("huge_pages", "yes"),
        ("huge_pages", 1),
        ("arena_directory", "arena"),
        ("allow_uids", "root"),
        ("allow_uids", [-1]),
        ("allow_uids", [1, 1]),
        ("allow_uids", 1000),
        ("allow_uids", [2**32 - 1]),
        ("tenants", "a"),
        ("tenants", ["a"]),
        ("record", "a\0b"),
        ("peers", "b"),
        ("peers", "b=127.0.0.1"),
        ("peers", "b=127.0.0.1:0"),
        ("peers", "b=127.0.0.1:1/0"),
        ("peers", "b=127.0.0.1:1/many"),
        ("peers", "b c=127.0.0.1:1"),
        ("peers", "b=10.0.0.2:1"),
        ("peers", "b=127.0.0.1:1,b=127.0.0.1:2"),
        ("peers", "b=127.0.0.1:1,c=127.0.0.1:1"),
        ("peers", "b=127.0.0.1:1/1GiB,c=127.0.0.1:2"),
        ("peers", "b=127.0.0.1:1,,c=127.0.0.1:2"),
        ("peers", [1]),
        ("peers", 1),
    ],
)
def test_values_that_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(**{field: value})
    assert caught.value.field == field
    assert caught.value.expected.endswith(f"(set by flag --{field.replace('_', '-')})")


@pytest.mark.parametrize(
    ("field", "value", "parsed"),
    [
        ("node", "gpu-7.rack_2", "gpu-7.rack_2"),
        ("memory", 1 << 20, 1 << 20),
        ("memory", "1048576", 1 << 20),
        ("listen", "localhost:0", "localhost:0"),
        ("listen", "127.1.2.3:65535", "127.1.2.3:65535"),
        ("listen", "[::1]:7440", "[::1]:7440"),
        ("metrics", "", ""),
        ("lease_s", 5, 5.0),
        ("lease_s", "2.5", 2.5),
        ("max_sessions", "7", 7),
        ("run_length", 1024, 1024),
        ("huge_pages", "1", True),
        ("huge_pages", "False", False),
        ("allow_uids", "0, 1000", (0, 1000)),
        ("allow_uids", [], ()),
        ("arena_directory", "/mnt/huge", "/mnt/huge"),
        ("peers", "", ()),
        (
            "peers",
            "b=127.0.0.1:1/1GiB, c=[::1]:2/2GiB",
            (Peer("b", "127.0.0.1", 1, 1 << 30), Peer("c", "::1", 2, 2 << 30)),
        ),
        ("peers", ["b=localhost:1"], (Peer("b", "localhost", 1),)),
        ("record", "events.log", "events.log"),
    ],
)
def test_values_that_are_taken(field: str, value: object, parsed: object) -> None:
    taken = getattr(load(**{field: value}).config, field)
    assert taken == parsed
    assert type(taken) is type(parsed)


@pytest.mark.parametrize(
    ("environ", "flags", "socket"),
    [
        ({}, {}, "/tmp/tokenlake-local.sock"),
        ({"XDG_RUNTIME_DIR": ""}, {"node": "a"}, "/tmp/tokenlake-a.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, {"node": "a"}, "/run/user/7/tokenlake-a.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, {"socket": "/x.sock"}, "/x.sock"),
    ],
)
def test_the_default_socket_follows_user_and_node(
    environ: dict[str, str], flags: dict[str, object], socket: str
) -> None:
    assert load(None, environ, **flags).config.socket == socket


def test_a_default_socket_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="socket.*set by default"):
        load(None, {"XDG_RUNTIME_DIR": "/run/" + "a" * 100})


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


def test_tenants_come_from_the_file() -> None:
    toml = tenant("a", uids=[1, 2]) + tenant("b", tokens=["t"])
    secret = bytes.fromhex(SECRET)
    assert load(toml).config.tenants == (Tenant("a", secret, uids=(1, 2)), Tenant("b", secret, tokens=("t",)))


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        (tenant(secret=None), "with a name and a secret"),
        (tenant(secret="00" * 15), "16 to 64 bytes in hexadecimal as the secret of tenant 'a'"),
        (tenant(secret="00" * 65), "16 to 64 bytes"),
        (tenant(secret="0g" * 16), "16 to 64 bytes"),
        (tenant("a b"), "a tenant's name of"),
        (tenant(uids=["x"]), "a list of user ids"),
        (tenant(tokens="t"), "a list of non-empty texts"),
        (tenant(tokens=[""]), "a list of non-empty texts"),
        (tenant(user="x"), "not 'user'"),
        (tenant() + tenant(), "twice there is a"),
        (tenant(uids=[1]) + tenant("b", uids=[1]), "twice there is 1"),
        (tenant(tokens=["hush"]) + tenant("b", tokens=["hush"]), "each token once"),
        ("tenants = 1", "an array of tables"),
    ],
)
def test_tenants_that_are_refused(toml: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tenants.*{reason}") as caught:
        load(toml)
    assert "hush" not in str(caught.value)
    assert "0g0g" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "environ"),
    [
        (tenant(uids=["x"]), {}),
        (tenant().replace("tenants", "tenant"), {}),
        (f"[clients]\nsecret = '{SECRET}'", {}),
        (f"secret = '{SECRET}'", {}),
        (f"cluster_secret = '{SECRET}0'", {}),
        (None, {"TOKENLAKE_CLUSTER_SECRET": f"{SECRET} "}),
        (None, {"TOKENLAKE_TENANTS": SECRET}),
        (None, {"TOKENLAKE_TENANT_TOKEN": SECRET}),
    ],
)
def test_no_error_shows_a_secret(toml: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(toml, environ)
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize("secret", [SECRET, SECRET * 4, ""])
def test_the_cluster_secret_comes_from_file_or_environment_and_is_masked(secret: str) -> None:
    for settings in (load(f"cluster_secret = '{secret}'"), load(None, {"TOKENLAKE_CLUSTER_SECRET": secret})):
        assert settings.config.cluster_secret == bytes.fromhex(secret)
        described = {field: value for field, value, _ in settings.describe()}
        assert described["cluster_secret"] == ("***" if secret else "")
        for text in (repr(settings), str(settings.config), f"{settings.config.cluster_secret}"):
            assert not secret or SECRET not in text
            assert repr(bytes.fromhex(SECRET)) not in text


@pytest.mark.parametrize("value", ["00" * 15, "00" * 65, "0g" * 16, "0" * 33, 16, ["00" * 16]])
def test_a_cluster_secret_that_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"cluster_secret.*\*\*\*.*16 to 64 bytes in hexadecimal"):
        load(f"cluster_secret = {value!r}")


def test_tenants_on_several_nodes_need_a_cluster_secret() -> None:
    peers = "a=127.0.0.1:1,b=127.0.0.1:2"
    for tenants in (tenant(), tenant() + tenant("b")):
        with pytest.raises(ConfigurationError, match="TOKENLAKE_CLUSTER_SECRET") as caught:
            load(tenants, node="a", listen="127.0.0.1:1", peers=peers)
        assert caught.value.field == "cluster_secret"
        load(tenants, {"TOKENLAKE_CLUSTER_SECRET": SECRET}, node="a", listen="127.0.0.1:1", peers=peers)
        load(tenants, node="a", listen="127.0.0.1:1", peers="a=127.0.0.1:1")
    load(node="a", listen="127.0.0.1:1", peers=peers)


def test_describe_masks_secrets_and_names_origins() -> None:
    settings = load(
        f"cluster_secret = '{SECRET}'\n" + tenant(tokens=["hush"], uids=[7]),
        {"TOKENLAKE_MEMORY": "96MiB"},
        peers="b=127.0.0.1:1/1GiB",
    )
    described = {field: (value, origin) for field, value, origin in settings.describe()}
    assert described["memory"] == ("96MiB", "environment TOKENLAKE_MEMORY")
    assert described["peers"] == ("b=127.0.0.1:1/1GiB", "flag --peers")
    assert described["lease_s"] == ("10.0", "default")
    assert described["tenants"] == ("Tenant(name='a', secret=***, uids=(7), tokens=1)", "file")
    for text in (str(described), repr(settings), str(settings.config)):
        assert SECRET not in text
        assert "hush" not in text
        assert repr(bytes.fromhex(SECRET)) not in text


def test_a_configuration_does_not_change() -> None:
    config = ServerConfig()
    with pytest.raises(AttributeError):
        config.memory = 1  # type: ignore[misc]


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1023, "1023"), (1024, "1KiB"), (64 << 20, "64MiB"), (3 << 39, "1536GiB")]
)
def test_a_size_is_shown_in_its_largest_whole_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.sampled_from(["127.0.0.1", "node-1.rack", "::1", "fe80::1"]), st.integers(0, 65535))
def test_a_shown_address_reads_back(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


def test_the_settings_of_engines_are_not_the_daemons() -> None:
    assert load(None, {"TOKENLAKE_ENGINE_LOAD": "sync"}).config == load(None, {}).config


@given(st.sampled_from(FIELDS), st.text())
def test_any_text_is_taken_or_refused_by_name(field: str, text: str) -> None:
    try:
        load(None, {f"TOKENLAKE_{field.upper()}": text})
    except ConfigurationError as error:
        assert error.field == field


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_ANY = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(st.sampled_from(FIELDS), _ANY)
def test_any_value_is_taken_or_refused_by_name(field: str, value: object) -> None:
    try:
        config = load(**{field: value}).config
    except ConfigurationError as error:
        assert error.field == field
    else:
        msgspec.json.encode(config, enc_hook=str)  # a secret has no encoding
