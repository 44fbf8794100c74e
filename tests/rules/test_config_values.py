"""The values of single settings: which are accepted, the errors of the others, and how values are shown."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.settings import CERTIFICATE, FIELDS, load
from tokenlake.config import Address, Disk, Peer, format_size, parse_address, parse_size
from tokenlake.errors import ConfigurationError

REFUSED: dict[str, list[object]] = {
    "node": ["", "a b", "a" * 65, "a\n", 3],
    "memory": ["64MB", "-1", 0, True, 1.5, "1.5GiB", (1 << 20) + 1, 1 << 60],
    "socket": ["", "/" + "a" * 107, "/" + "\N{GREEK SMALL LETTER ALPHA}" * 60],
    "listen": [
        "127.0.0.1",
        "127.0.0.1:65536",
        "0.0.0.0:7440",
        "10.0.0.1:7440",
        "[::]:7440",
        "example.com:7440",
        "",
        7440,
    ],
    "metrics": ["127.0.0.1:7440"],
    "cluster": ["", "Lake", "a/b"],
    "certificate": ["only-this.pem", "a\0b"],
    "ca": ["only-this.pem"],
    "disk": ["relative", "/a:63MiB", "/a:1GB", "/a,/a:1GiB", 7],
    "disk_keys": ["abcd"],
    "region_size": ["1KiB", "5GiB"],
    "lease_s": ["nan", "inf", True, 10**400],
    "reservation_s": [3601],
    "match_deadline_ms": [0.5],
    "suspect_ms": [0],
    "dirty_share": [0, 0.96, 1.01],
    "session_lease_share": [-0.1],
    "session_reserve_share": ["half"],
    "max_sessions": [0, False],
    "huge_pages": ["yes"],
    "state_directory": ["state"],
    "allow_uids": ["root", [-1], [1, 1], 1000, [2**32 - 1]],
    "tenants": ["a", ["a"]],
    "log_level": ["DEBUG", 10],
    "peers": [
        "b",
        "b=127.0.0.1",
        "b=127.0.0.1:0",
        "b=127.0.0.1:1/0",
        "b=127.0.0.1:1/many",
        "b c=127.0.0.1:1",
        "b=10.0.0.2:1",
        "b=127.0.0.1:1,b=127.0.0.1:2",
        "b=127.0.0.1:1,c=127.0.0.1:1",
        "b=127.0.0.1:1/1GiB,c=127.0.0.1:2",
        "b=127.0.0.1:1,,c=127.0.0.1:2",
        [1],
        1,
    ],
}
"""Values by setting."""


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, some in REFUSED.items() for value in some])
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
        ("huge_pages", "1", True),
        ("huge_pages", "False", False),
        ("allow_uids", "0, 1000", (0, 1000)),
        ("allow_uids", [], ()),
        ("state_directory", "/mnt/state", "/mnt/state"),
        ("peers", "", ()),
        (
            "peers",
            "b=127.0.0.1:1/1GiB, c=[::1]:2/2GiB",
            (Peer("b", "127.0.0.1", 1, 1 << 30), Peer("c", "::1", 2, 2 << 30)),
        ),
        ("peers", ["b=localhost:1"], (Peer("b", "localhost", 1),)),
        ("log_level", "debug", "debug"),
    ],
)
def test_values_that_are_taken(field: str, value: object, parsed: object) -> None:
    taken = getattr(load(**{field: value}).config, field)
    assert taken == parsed
    assert type(taken) is type(parsed)


@given(st.integers(0, 10**18 - 1))
def test_a_formatted_size_reads_back(size: int) -> None:
    """A size has at most 18 digits."""
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1023, "1023"), (1024, "1KiB"), (64 << 20, "64MiB"), (3 << 39, "1536GiB")]
)
def test_a_size_is_shown_in_its_largest_whole_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.sampled_from(["127.0.0.1", "node-1.rack", "::1", "fe80::1"]), st.integers(0, 65535))
def test_a_shown_address_reads_back(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_ANY = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(st.sampled_from(FIELDS), _ANY)
def test_any_value_is_taken_or_refused_by_name(field: str, value: object) -> None:
    try:
        config = load(**{field: value}).config
    except ConfigurationError as error:
        assert error.field == field
    else:
        msgspec.json.encode(config, enc_hook=str)  # `str` hides a secret, which has no encoding


@pytest.mark.parametrize("settings", [CERTIFICATE, {"unencrypted_beyond_loopback": "true"}])
@pytest.mark.parametrize("address", ["10.0.0.1:7440", "[::]:7440", "[2001:db8::1]:7440", "node2.example:7440"])
def test_addresses_beyond_loopback_need_encryption(address: str, settings: dict[str, str]) -> None:
    for field, value in (("listen", address), ("peers", f"b={address}")):
        config = load(None, **settings, **{field: value}).config
        assert address in (config.listen, *(str(Address(peer.host, peer.port)) for peer in config.peers))
        with pytest.raises(ConfigurationError, match="there is no 'certificate'") as caught:
            load(None, **{field: value})
        assert caught.value.field == field


def test_disks() -> None:
    text = "/mnt/a:64MiB,/mnt/b"
    disks = load(disk=text).config.disk
    assert disks == (Disk("/mnt/a", 64 << 20), Disk("/mnt/b"))
    assert ",".join(map(str, disks)) == text
    assert load(disk=["/mnt/a:64MiB", "/mnt/b"]).config.disk == disks
