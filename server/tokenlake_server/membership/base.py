"""The interface of a membership, and its result types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from tokenlake.config import Address
from tokenlake.directory.ring_record import Member, RingRecord


class Account(msgspec.Struct, frozen=True):
    """The account of a node that drained."""

    moved: tuple[tuple[str, int, int], ...]
    """(node, segments, bytes) of the nodes that took segments over, the one with most segments first."""
    lost: tuple[int, int]
    """Segments and bytes that the node still owned, in memory or on disk: no other node took them."""

    def __str__(self) -> str:
        """For the log and for people."""
        moved = [f"{_amount(segments, nbytes)} to '{node}'" for node, segments, nbytes in self.moved]
        handed = f"handed over {', '.join(moved)}" if moved else "handed nothing over"
        segments, nbytes = self.lost
        why = "which were on its disk alone, or which no other node had room, or within 'drain_s' time, to take"
        lost = f"lost {_amount(segments, nbytes)}, {why}" if segments else "lost nothing"
        return f"it {handed}, and {lost}"


class Members(msgspec.Struct, frozen=True):
    """The members of the cluster at one epoch."""

    record: RingRecord
    """This node is always a member of it."""
    addresses: Mapping[str, Address]
    """By name, where other members listen. An entry may lack: the member has not registered since this node started."""
    unproven: Mapping[str, Address] = {}
    """Where nodes listen with which this one is to complete a handshake: at a member, daemons that ask to join; at a
    node that asks itself, members that may prove it."""
    drained: Mapping[str, Account] = {}
    """The accounts of the last nodes that drained and left while this daemon ran, by name, the newest last."""


class MembershipState(msgspec.Struct, frozen=True):
    """The state of a membership, for the health pages."""

    source: str
    """`peers` for a static list, or the endpoints of etcd."""
    known: bool
    """True once this node is a member of the cluster's ring, and a member has proven it. Until then it serves its
    engines alone."""
    epoch: int
    problem: str = ""
    """The reason why the membership cannot be read or changed now; empty if it can."""
    absent: tuple[str, ...] = ()
    """Members whose daemons are not registered. That says nothing about whether they are alive."""


OnMembers = Callable[[Members], None]


class Membership(Protocol):
    """The source of the members. All functions are called on the daemon's loop and do not block it."""

    @property
    def members(self) -> Members:
        """The members as they are known now. A daemon starts with these."""
        ...

    @property
    def state(self) -> MembershipState:
        """The state at this moment."""
        ...

    def start(self, address: Address, changed: OnMembers) -> None:
        """Begin: `changed` is called on the loop with each new value of `members`. `address`: where other daemons reach
        this one."""
        ...

    def refresh(self) -> None:
        """Read the record soon, because a peer named a higher epoch. Calls may be as many as there are messages."""
        ...

    def proven(self, node: str, incarnation: int) -> None:
        """Take note of a complete handshake with one of `Members.unproven`, at its address. A member then lets that
        node join."""
        ...

    async def drain(self, node: str = "") -> None:
        """Mark this node, or another one whose daemon is registered, as draining in the record. Raises `Refused` where
        members cannot be changed, `Unreachable`."""
        ...

    async def remove(self, node: str) -> None:
        """Take another node, whose daemon is not registered, out of the record. Raises as `drain`."""
        ...

    async def leave(self, account: Account) -> None:
        """Take this node, which has drained, out of the record, and tell the members its account. Raises as `drain`."""
        ...

    async def close(self) -> None:
        """End, and give up the registration of this node's address. The node stays a member."""
        ...


def _amount(segments: int, nbytes: int) -> str:
    return f"{segments:,} segment{'' if segments == 1 else 's'} ({nbytes / (1 << 20):,.1f} MiB)"


def alone(node: str, memory: int, epoch: int = 0) -> Members:
    """The members of a daemon that serves its engines alone."""
    unit = RingRecord.of({node: memory}).unit
    return Members(RingRecord(epoch, unit, {node: Member(memory)}), {})
