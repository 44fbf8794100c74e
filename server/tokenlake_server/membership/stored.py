"""The state of a cluster in etcd: the keys below its prefix, and their values as JSON.

::

    /tokenlake/CLUSTER/ring         the ring record, without a lease
    /tokenlake/CLUSTER/nodes/NAME   where the daemon of the node NAME listens, under a lease of that daemon

Fields of the JSON that this version does not know are kept when a record is written again, so that daemons of two
versions may share it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tokenlake.config import Address, parse_address
from tokenlake.config.kinds import Kind, Name
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import MembershipRefused
from tokenlake_server.membership.base import Account
from tokenlake_server.membership.etcd_client import Etcd, Put, Read

MAX_VIRTUAL_NODES = 1 << 18
"""Limit of a record's virtual nodes: building a ring of them takes a few seconds. A record that asks for more was not
written by a daemon, or its unit is far too small for the nodes of today."""
MAX_EPOCH = 1 << 48
_NAME = Kind.of(Name)
_NO_VALUE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""Errors of a value that no daemon wrote: other JSON, numbers out of range, lists that are nested too deeply."""
CONFLICT_S = 0.05
"""Mean seconds until a change that conflicted with another one is tried again."""


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of a key `nodes/NAME`."""

    address: str
    incarnation: int
    capacity: int
    """Bytes of the node's memory."""
    version: str
    """Version of the daemon's package."""
    proven_by: str = ""
    """The member that has proven this process by a handshake; its own name where no member ran. Empty: it asks to
    join."""
    drained: Account | None = None
    """Set by a node that has drained, when it leaves the ring."""

    def at(self) -> Address:
        """Where the daemon listens. Raises ValueError."""
        return parse_address(self.address)


class StoredNode(NamedTuple):
    """A key of a registration in etcd. `registration` is None if no daemon wrote its value."""

    registration: Registration | None
    mod_revision: int
    lease: int


class Stored(NamedTuple):
    """All keys of a cluster at one moment."""

    record: RingRecord | None
    """None: there is no ring record."""
    text: bytes
    """The JSON of the record."""
    mod_revision: int
    """The revision of the ring record; 0 where there is none."""
    nodes: Mapping[str, StoredNode]


def prefix_of(cluster: str) -> bytes:
    """The prefix of a cluster's keys."""
    return f"/tokenlake/{cluster}/".encode()


def ring_key(cluster: str) -> bytes:
    """The key of the ring record."""
    return prefix_of(cluster) + b"ring"


def node_key(cluster: str, node: str) -> bytes:
    """The key of a node's registration."""
    return prefix_of(cluster) + b"nodes/" + node.encode()


def parse(cluster: str, found: Iterable[Read]) -> Stored:
    """The cluster's keys. Raises `MembershipRefused`, which names the key, for a ring record that is no ring, and for a
    prefix without a ring record that holds keys of another application."""
    record, text, revision = None, b"", 0
    nodes: dict[str, StoredNode] = {}
    foreign = []
    for each in found:
        name = _node_name(cluster, each.key)
        if each.key == ring_key(cluster):
            record, text, revision = decode_ring(each.key, each.value), each.value, each.mod_revision
        elif name is not None:
            nodes[name] = StoredNode(_registration(each.value), each.mod_revision, each.lease)
        else:
            foreign.append(each.key.decode(errors="replace"))
    if foreign and record is None:
        raise MembershipRefused(
            f"etcd holds keys of another application below {prefix_of(cluster).decode()}, such as {foreign[0]!r}; give "
            "the cluster another name ('cluster'), or remove the keys"
        )
    return Stored(record, text, revision, nodes)


def decode_ring(key: bytes, text: bytes) -> RingRecord:
    """The ring record of a JSON text. Raises `MembershipRefused`, which names the key and the defect."""
    try:
        record = msgspec.json.decode(text, type=RingRecord)
        for name in record.members:
            _NAME.parse(name)
        if record.epoch > MAX_EPOCH or virtual_nodes(record) > MAX_VIRTUAL_NODES:
            raise ValueError(f"no daemon writes an epoch of {record.epoch} with {virtual_nodes(record)} virtual nodes")
    except _NO_VALUE as error:
        raise MembershipRefused(f"the key {key.decode()} of etcd is no ring record: {error}") from None
    return record


def provers(stored: Stored, node: str) -> list[str]:
    """The members that run and may prove `node`, in the order in which they try: another one for each node."""
    able = [
        name
        for name in (stored.record.members if stored.record is not None else ())
        if name != node and (found := stored.nodes.get(name)) and found.registration and found.registration.proven_by
    ]
    return sorted(able, key=lambda name: hashlib.blake2b(f"{node} {name}".encode()).digest())


def virtual_nodes(record: RingRecord) -> int:
    """The number of virtual nodes of a record's members together."""
    return sum(max(1, round(member.weight / record.unit)) for member in record.members.values())


def encode_ring(record: RingRecord, previous: bytes = b"") -> bytes:
    """The JSON of a record. `previous`: the JSON that it replaces, whose unknown fields are kept."""
    text: dict[str, Any] = json.loads(previous) if previous else {}
    members: dict[str, Any] = text.get("members", {})
    text["epoch"], text["unit"] = record.epoch, record.unit
    text["members"] = {
        name: members.get(name, {}) | msgspec.to_builtins(member) for name, member in record.members.items()
    }
    return json.dumps(text, sort_keys=True).encode()


async def change(
    etcd: Etcd, cluster: str, edit: Callable[[Stored], RingRecord], account: tuple[str, Account] | None = None
) -> RingRecord:
    """Write `edit(stored)` in place of the ring record, and read again if another writer came first. `edit` may raise;
    nothing is written then, nor if it returns the stored record. `account`: name and account of a node that leaves,
    which are written into its registration, if there is one."""
    while True:
        stored = parse(cluster, await etcd.read(prefix_of(cluster)))
        record = edit(stored)
        if record == stored.record:
            return record
        puts = [Put(ring_key(cluster), encode_ring(record, stored.text))]
        unchanged = {puts[0].key: stored.mod_revision}
        node = stored.nodes.get(account[0]) if account is not None else None
        if account is not None and node is not None and node.registration is not None:
            told = msgspec.structs.replace(node.registration, drained=account[1])
            puts.append(Put(node_key(cluster, account[0]), msgspec.json.encode(told), node.lease))
            unchanged[puts[1].key] = node.mod_revision
        if await etcd.write(unchanged, puts):
            return record
        await asyncio.sleep(random.uniform(0, 2 * CONFLICT_S))


def _node_name(cluster: str, key: bytes) -> str | None:
    head = node_key(cluster, "")
    try:
        return str(_NAME.parse(key.removeprefix(head).decode())) if key.startswith(head) else None
    except (UnicodeError, ValueError):
        return None


def _registration(text: bytes) -> Registration | None:
    try:
        found = msgspec.json.decode(text, type=Registration)
        found.at()
        if found.capacity <= 0:
            raise ValueError("no daemon writes this capacity")
    except _NO_VALUE:
        return None
    return found
