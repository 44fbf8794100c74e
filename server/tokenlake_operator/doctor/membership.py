"""The members: etcd, and the addresses of other nodes, before this node's daemon has tried them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from tokenlake.config import Address, ServerConfig, is_loopback
from tokenlake.errors import ConfigurationError, CredentialRefused, MembershipRefused, TokenLakeError
from tokenlake_operator.doctor.base import Finding

ETCD_S = 3.0
DIAL_S = 1.0
AT_ONCE = 16
_CURES: tuple[tuple[type[TokenLakeError], str, str], ...] = (
    (
        CredentialRefused,
        "etcd-refused",
        "give 'etcd_user' and 'etcd_password', or the certificate, of a user with the keys below {prefix}",
    ),
    (MembershipRefused, "etcd-keys", "choose another 'cluster', or remove the keys of the other application"),
    (
        TokenLakeError,
        "etcd",
        "start etcd, correct the endpoints (`etcdctl --endpoints HOST:PORT endpoint health`), and let the firewall "
        "pass them; set 'etcd_ca' where etcd uses TLS, and unset it where etcd does not",
    ),
)
"""(error of etcd, name of the check, cure); the first that fits counts."""


def check_membership(config: ServerConfig, *, running: bool) -> Iterator[Finding]:
    """`running`: the daemon of this node runs, and tells the states of its connections itself."""
    if config.etcd:
        yield from _etcd(config, running=running)
    elif not running:
        yield from _reachable({peer.name: Address(peer.host, peer.port) for peer in config.peers})


def _etcd(config: ServerConfig, *, running: bool) -> Iterator[Finding]:
    from tokenlake_server.membership.etcd_client import Access, on_any
    from tokenlake_server.membership.stored import parse, prefix_of

    where = "etcd = " + ",".join(map(str, config.etcd))
    prefix = prefix_of(config.cluster)
    try:
        found = asyncio.run(on_any(Access.of(config), lambda etcd: etcd.read(prefix), ETCD_S))
        stored = parse(config.cluster, found)
    except ConfigurationError as error:
        file = f"{error.field} = {error.value}"
        yield Finding("error", "etcd-file", file, "it cannot be used", f"give {error.expected}")
        return
    except TokenLakeError as error:
        check, cure = next((check, cure) for kind, check, cure in _CURES if isinstance(error, kind))
        yield Finding("error", check, where, str(error), cure.format(prefix=prefix.decode()))
        return
    nodes = {name: each.registration for name, each in stored.nodes.items() if each.registration is not None}
    other = nodes.get(config.node)
    if other is not None and not running:
        yield Finding(
            "error",
            "name-taken",
            f"node = {config.node}",
            f"a daemon of this name is registered at {other.address}, of version {other.version}",
            "choose another 'node'; or wait 5 s, if that daemon has just ended",
        )
    own = other.at() if running and other is not None else None
    others = {name: each.at() for name, each in nodes.items() if name != config.node}
    if own is not None and is_loopback(own.host) and not all(is_loopback(each.host) for each in others.values()):
        yield Finding(
            "error",
            "advertise-loopback",
            f"advertise = {config.advertise or config.listen}",
            f"this node is registered at {own}, where other machines reach themselves",
            "set 'listen' or 'advertise' to an address at which other machines reach this one",
        )
    if not running:
        yield from _reachable(others)


def _reachable(addresses: Mapping[str, Address]) -> Iterator[Finding]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        problems = list(threads.map(_problem, addresses.values()))
    for (name, address), found in zip(addresses.items(), problems, strict=True):
        if found:
            check, problem, cure = found
            yield Finding("error", check, f"peer {name} = {address}", problem, cure)


def _problem(address: Address) -> tuple[str, str, str] | None:
    """(check, problem, cure) of an address that cannot be reached. A machine that refuses is there: its daemon may be
    started later."""
    try:
        socket.create_connection((address.host, address.port), DIAL_S).close()
    except socket.gaierror as error:
        return (
            "peer-name",
            f"the name cannot be resolved ({error.strerror})",
            "use a name that DNS knows, or an IP address",
        )
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return None
        reason = f"no answer within {DIAL_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror
        cure = f"let the firewall pass TCP port {address.port} in both directions, or correct the address"
        return "peer-unreachable", f"packets to it are lost: {reason}", cure
    return None
