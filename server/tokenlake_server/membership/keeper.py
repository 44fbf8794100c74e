"""Keeps a node registered in etcd and a member of the ring record, and publishes what etcd stores.

The state of etcd is always read as a whole: a watch says *when* to read again and not what has changed, so that a watch
that ended, was compacted or missed a change costs one more read and loses nothing::

    read all keys -> write what is missing (one transaction) -> read again -> publish -> wait
        ^                                                                                  |
        +---- the watch reports a change, the lease has ended, `refresh`, or `proven` -----+

    any error: the next endpoint, from the beginning; the daemon keeps the members that it has

A node joins once per start, and does not add itself::

    newcomer                    etcd                                  a member (the first of a row)
       | registers, unproven --->|------------------------------------>|
       |<----------------------------------- handshake, at the registered address
       |                         |<-- record with the node; proven_by --| one transaction
       |<--- it is a member -----|

Until then it publishes no ring and serves its engines alone, also where the record has its name already: another daemon
may have taken that. Where no member runs, a node that the record has, or that founds the ring, takes its place itself.
A node that an operator removes later stays out until its daemon is started again. A registration that expired says that
a daemon does not reach etcd and nothing else; the node stays a member at its last known address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping

import msgspec

from tokenlake.config import Address
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import MembershipRefused, TokenLakeError
from tokenlake_server.loop.repeated_warning import RepeatedWarning
from tokenlake_server.membership.base import Account, Members, MembershipState, alone
from tokenlake_server.membership.etcd_client import Access, Etcd, Put, on_any
from tokenlake_server.membership.stored import (
    MAX_VIRTUAL_NODES,
    Registration,
    Stored,
    encode_ring,
    node_key,
    parse,
    prefix_of,
    provers,
    ring_key,
    virtual_nodes,
)

log = logging.getLogger(__name__)

LEASE_S = 5
"""Seconds for which a registration outlives its last renewal."""
RETRY_S = 1.0
"""Seconds until the next attempt of a node that may not join, and between two reads because of `refresh`."""
PAUSE_S = 0.3
"""Mean seconds between two attempts to reach etcd. It is random, so that nodes do not return all at once."""
ANSWER_S = 0.5
"""Seconds within which the daemon of another registration of this node's name must accept a connection."""
RIVAL_S = 3 * LEASE_S
"""Seconds for which such a daemon is remembered after its registration expired: it may run, and be cut off from etcd
only."""

STAGGER_S, LONGEST_STAGGER_S = 0.25, 5.0
"""Seconds after which the next member begins to prove a node that asks to join, and after which all members do. Mostly
the first one does it; a member that is cut off from the node is passed over."""
KNOCKS = 3
"""Number of members with which a node that asks to join begins a handshake itself, so that it knows the reason where
one is refused."""
ACCOUNTS = 64
"""Number of nodes that drained whose accounts are kept."""
WAITS_S = 2.0
"""Seconds after which the log says that no member has proven this node."""

Publish = Callable[[Members | None, MembershipState], None]
"""A function that is called with the members (None if they have not changed) and the state of the membership."""


class Keeper:
    """The part of the membership that runs in the admin thread, on its loop."""

    def __init__(self, access: Access, cluster: str, node: str, registration: Registration, publish: Publish) -> None:
        self._access = access
        self._cluster = cluster
        self._node = node
        self._registration = registration
        self._publish = publish
        self._bell = asyncio.Event()
        """Set: the keys are to be read again."""
        self._lease = 0
        self._record: RingRecord | None = None
        """The newest record that was accepted; None while this node is no member."""
        self._drained: dict[str, Account] = {}
        """The accounts of the last nodes that drained and left, by name."""
        self._addresses: dict[str, Address] = {}
        """Last known addresses of members."""
        self._rival: tuple[Registration, float] | None = None
        """The last registration of another daemon with this node's name, and until when it counts."""
        self._registered = False
        """True once this node has registered."""
        self._proofs: dict[str, int] = {}
        """By name, the incarnation of the last process of a node with which this one completed a handshake."""
        self._asked: dict[tuple[str, int], float] = {}
        """The daemons that ask to join, by name and incarnation, and the time at which this node saw that first."""
        self._warning = RepeatedWarning()
        self._waiting = RepeatedWarning(WAITS_S)
        self._absent: frozenset[str] = frozenset()
        self._looks = False

    def refresh(self) -> None:
        """Read the keys again, at most once in `RETRY_S`."""
        if not self._looks:
            self._looks = True
            self._bell.set()
            asyncio.get_running_loop().call_later(RETRY_S, self._look_again)

    def _look_again(self) -> None:
        self._looks = False

    def proven(self, node: str, incarnation: int) -> None:
        """A handshake with a daemon that asks to join is complete, at the address that it registered."""
        self._proofs[node] = incarnation
        self._bell.set()

    async def run(self) -> None:
        """Keep a session with etcd until cancelled: after a session has ended, the next endpoint is tried."""
        at = random.randrange(len(self._access.endpoints))
        while True:
            try:
                await self._session(self._access.endpoints[at % len(self._access.endpoints)])
            except* TokenLakeError as errors:
                self._failed(_first(errors))
            except* Exception as errors:
                log.exception("the membership failed, trying again", exc_info=errors)
                self._failed(_first(errors))
            at += 1
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))

    async def unregister(self, deadline_s: float) -> None:
        """Delete this node's registration, after `run` was cancelled. Raises the errors of `Etcd`."""
        if self._lease:
            await on_any(self._access, lambda etcd: etcd.revoke(self._lease), deadline_s)

    # -- one session with one endpoint

    async def _session(self, endpoint: Address) -> None:
        async with Etcd(self._access, endpoint) as etcd, asyncio.TaskGroup() as group:
            group.create_task(self._watch(etcd))
            group.create_task(self._renew(etcd))
            while True:
                # The bell is cleared before the read, so that a change during the read makes another one.
                self._bell.clear()
                try:
                    wait_s = await self._step(etcd)
                except MembershipRefused as error:
                    self._failed(error)
                    wait_s = RETRY_S
                # `asyncio.wait_for` of Python 3.11 loses the cancellation by the group when the bell rings meanwhile.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._bell.wait()

    async def _watch(self, etcd: Etcd) -> None:
        async for _ in etcd.watch(prefix_of(self._cluster)):
            self._bell.set()

    async def _renew(self, etcd: Etcd) -> None:
        while True:
            lease = self._lease
            if lease and not await etcd.keep(lease) and lease == self._lease:
                log.warning("the lease of this node's registration in etcd ended; the node registers again")
                self._lease = 0
                self._bell.set()
            await asyncio.sleep(LEASE_S / 3)

    async def _step(self, etcd: Etcd) -> float | None:
        """Read the keys; write what is missing, else publish. Returns the seconds until the next step, None for the
        next change. Raises `MembershipRefused` where this node must not go on."""
        stored = parse(self._cluster, await etcd.read(prefix_of(self._cluster)))
        own = stored.nodes.get(self._node)
        found = own.registration if own is not None else None
        await self._check_rival(found)
        if found is not None and found.incarnation == self._registration.incarnation and found.proven_by:
            self._registration = found
        record, registration = self._wanted(stored)
        if record == stored.record and own is not None and found == registration and own.lease == self._lease:
            due, wait_s = self._to_prove(record, stored)
            for other, newcomer in due.items():
                if self._proofs.get(other) == newcomer.incarnation:
                    return await self._admit(etcd, stored, other, newcomer)
            return self._accept(record, stored, due, wait_s)
        if not self._lease or not await etcd.keep(self._lease):
            self._lease = await etcd.grant(LEASE_S)
        name = Put(node_key(self._cluster, self._node), msgspec.json.encode(registration), self._lease)
        ring = Put(ring_key(self._cluster), encode_ring(record, stored.text))
        unchanged = {name.key: own.mod_revision if own is not None else 0, ring.key: stored.mod_revision}
        done = await etcd.write(unchanged, [name, ring] if record != stored.record else [name])
        return 0.0 if done else random.uniform(0, 0.1)  # other nodes join at the same time

    # -- other nodes that ask to join

    def _to_prove(self, record: RingRecord, stored: Stored) -> tuple[dict[str, Registration], float | None]:
        """The daemons that ask to join and that this node has to prove by now, by name; and the seconds until the next
        one is due, None if there is none."""
        newcomers = {
            name: node.registration
            for name, node in stored.nodes.items()
            if name != self._node and node.registration is not None and not node.registration.proven_by
        }
        newcomers = {name: each for name, each in newcomers.items() if _fits(record, name, each)}
        self._proofs = {name: each for name, each in self._proofs.items() if name in newcomers}
        now, due, waits = _now(), dict[str, Registration](), []
        self._asked = {
            (name, each.incarnation): self._asked.get((name, each.incarnation), now) for name, each in newcomers.items()
        }
        for name, each in newcomers.items():
            able = provers(stored, name)
            if self._node not in able:
                continue
            delay_s = min(LONGEST_STAGGER_S, STAGGER_S * able.index(self._node))
            left_s = self._asked[name, each.incarnation] + delay_s - now
            if left_s <= 0:
                due[name] = each
            else:
                waits.append(left_s)
        return due, min(waits, default=None)

    async def _admit(self, etcd: Etcd, stored: Stored, name: str, newcomer: Registration) -> float:
        """Let a node join that has proven itself, unless its registration, or the record, has changed meanwhile."""
        assert stored.record is not None
        record, node = stored.record.with_member(name, newcomer.capacity), stored.nodes[name]
        proven = msgspec.structs.replace(newcomer, proven_by=self._node)
        puts = [Put(node_key(self._cluster, name), msgspec.json.encode(proven), node.lease)]
        if record != stored.record:
            puts.append(Put(ring_key(self._cluster), encode_ring(record, stored.text)))
        unchanged = {node_key(self._cluster, name): node.mod_revision, ring_key(self._cluster): stored.mod_revision}
        if await etcd.write(unchanged, puts):
            log.info("node '%s' at %s has proven itself to this node, and may join", name, newcomer.address)
            return 0.0
        return random.uniform(0, 0.1)

    async def _check_rival(self, found: Registration | None) -> None:
        """Raises `MembershipRefused` while another daemon with this node's name answers."""
        now = asyncio.get_running_loop().time()
        if found is not None and found.incarnation != self._registration.incarnation:
            self._rival = found, now + RIVAL_S
        if self._rival is None:
            return
        rival, until = self._rival
        # A registration that replaced that of this node belongs to a daemon that started later, even if it cannot be
        # reached from here. Otherwise a daemon registered at the address of this node has ended, because this one
        # listens there now.
        displaced = self._registered and rival is found
        others = rival.address != self._registration.address
        if displaced or (now < until and others and await _answers(rival.at())):
            raise MembershipRefused(
                f"another daemon is called '{self._node}': it listens at {rival.address} (incarnation "
                f"{rival.incarnation}); give every node a name of its own ('node')"
            )
        self._rival = None

    def _wanted(self, stored: Stored) -> tuple[RingRecord, Registration]:
        """The record and the registration of this node that etcd should hold. Raises `MembershipRefused` for a record
        that this node does not follow."""
        known, node, memory = self._record, self._node, self._registration.capacity
        key = ring_key(self._cluster).decode()
        if stored.record is None and known is not None:
            log.warning("the key %s is gone from etcd; this node writes it again, at epoch %d", key, known.epoch)
            return known, self._registration
        others = sorted(stored.nodes.keys() - {node})
        if stored.record is None and others:
            raise MembershipRefused(
                f"the key {key} of etcd is missing, although {', '.join(others)} registered; a node that knows the "
                "ring writes it again"
            )
        record = alone(node, memory, epoch=1).record if stored.record is None else stored.record
        if known is not None and record.epoch < known.epoch:
            raise MembershipRefused(
                f"the ring record in etcd has epoch {record.epoch}, which is lower than the epoch {known.epoch} "
                "of this node: a backup of etcd was restored, or another program wrote the key. The nodes keep their "
                f"ring; delete the key {key}, and they write it again"
            )
        if known is not None and record.epoch == known.epoch and record != known:
            raise MembershipRefused(
                f"the ring record in etcd changed but kept its epoch {known.epoch}: another program wrote the key {key}"
            )
        if self._registration.proven_by:
            return record, self._registration
        if not _fits(record, node, self._registration):
            raise MembershipRefused(
                f"the memory of '{node}' is too large for this ring, whose unit of {record.unit} bytes comes from "
                "the node that started first: let a node of the usual size start first"
            )
        if (record.members and node not in record.members) or provers(stored, node):
            return record, self._registration
        return record.with_member(node, memory), msgspec.structs.replace(self._registration, proven_by=node)

    # -- members and states for the daemon

    def _accept(
        self, record: RingRecord, stored: Stored, due: Mapping[str, Registration], wait_s: float | None
    ) -> float | None:
        if self._warning.logged:
            log.info("%s answers again; the ring has epoch %d", self._access, record.epoch)
        self._registered = True
        if not self._registration.proven_by:
            return self._wait(record, stored)
        self._note_changes(record, stored)
        self._record = record
        # A daemon that has the name of a member, and is not proven, does not change its address.
        registered = {name: node.registration for name, node in stored.nodes.items() if node.registration is not None}
        found = {name: each.at() for name, each in registered.items() if each.proven_by}
        known = {name: at for name, at in {**self._addresses, **found}.items() if name in record.members}
        self._addresses = {name: at for name, at in known.items() if name != self._node}
        self._note_absent(record, stored)
        if self._node in record.members:
            self._warning.should_log(None, _now())
            unproven = {name: each.at() for name, each in due.items()}
            self._publish(Members(record, self._addresses, unproven, dict(self._drained)), self._state(""))
            return wait_s
        problem = (
            f"'{self._node}' was removed from the ring of cluster '{self._cluster}', which has epoch {record.epoch}; "
            "it serves its engines alone until it is started again"
        )
        self._warn("removed", problem)
        members = alone(self._node, self._registration.capacity, record.epoch)
        self._publish(msgspec.structs.replace(members, drained=dict(self._drained)), self._state(problem))
        return RETRY_S

    def _wait(self, record: RingRecord, stored: Stored) -> float:
        """This node asks to join, and no member has proven it yet."""
        self._warning.should_log(None, _now())
        names, able = ", ".join(record.members), provers(stored, self._node)[:KNOCKS]
        if able:
            at = self._registration.address
            problem = f"no member of the ring has proven it at {at} (cluster '{self._cluster}', members {names})"
        else:
            problem = (
                f"no member runs that could prove it (cluster '{self._cluster}', members {names}): start one of them, "
                "or remove those that are gone for good (`tokenlake remove NAME`)"
            )
        if self._waiting.should_log("unproven", _now()):
            log.warning("membership: this node asks to join the ring, and %s", problem)
        nodes = {name: stored.nodes[name].registration for name in able}
        knocks = {name: each.at() for name, each in nodes.items() if each is not None}
        members = alone(self._node, self._registration.capacity)
        self._publish(msgspec.structs.replace(members, unproven=knocks), self._state(problem))
        return RETRY_S

    def _note_changes(self, record: RingRecord, stored: Stored) -> None:
        """Log the members that came and left, and keep the accounts of those that drained."""
        if self._record is None:
            if self._node not in record.members:
                return
            proven = self._registration.proven_by
            how = f"'{proven}' has proven it" if proven != self._node else "no other member ran"
            names = ", ".join(record.members)
            log.info("this node is a member of the ring: %s; epoch %d, members %s", how, record.epoch, names)
            return
        before, after = self._record.members.keys(), record.members.keys()
        for name in sorted(after - before):
            log.info("'%s' joined the ring: epoch %d, %d members", name, record.epoch, len(after))
            self._drained.pop(name, None)
        for name in sorted(before - after):
            found = stored.nodes.get(name)
            account = found.registration.drained if found is not None and found.registration is not None else None
            if account is not None:
                self._drained[name] = account
            told = "it did not drain" if account is None else str(account)
            log.info("'%s' left the ring: epoch %d, %d members; %s", name, record.epoch, len(after), told)
        while len(self._drained) > ACCOUNTS:
            del self._drained[next(iter(self._drained))]

    def _note_absent(self, record: RingRecord, stored: Stored) -> None:
        absent = frozenset(record.members.keys() - stored.nodes.keys())
        for name in sorted(absent - self._absent):
            log.warning(
                "member '%s' is not registered in etcd; it stays a member (`tokenlake remove %s`, if it is gone for "
                "good)",
                name,
                name,
            )
        for name in sorted((self._absent - absent) & record.members.keys()):
            log.info("member '%s' is registered in etcd again", name)
        self._absent = absent

    def _failed(self, error: BaseException) -> None:
        self._warn(type(error), str(error) or repr(error))
        self._publish(None, self._state(str(error) or repr(error)))

    def _warn(self, kind: object, problem: str) -> None:
        if self._warning.should_log(kind, _now()):
            log.error("membership: %s", problem)

    def _state(self, problem: str) -> MembershipState:
        record = self._record
        known = record is not None and self._node in record.members
        absent = tuple(sorted(self._absent))
        return MembershipState(str(self._access), known, record.epoch if record is not None else 0, problem, absent)


def _fits(record: RingRecord, name: str, newcomer: Registration) -> bool:
    """True if the ring has few enough virtual nodes with the newcomer; a daemon does not ask otherwise."""
    return virtual_nodes(record.with_member(name, newcomer.capacity)) <= MAX_VIRTUAL_NODES


def _now() -> float:
    return asyncio.get_running_loop().time()


def _first(error: BaseException) -> BaseException:
    """The first error within a group of errors, or `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _answers(address: Address) -> bool:
    """Returns whether a connection to the address is accepted within `ANSWER_S`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, UnicodeError):
        return False
    writer.close()
    return True
