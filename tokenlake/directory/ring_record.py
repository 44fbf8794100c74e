"""The ring record of a cluster: its members with their weights, and the epoch that counts its changes.

Membership (a static list, or etcd) stores the record; the hash ring (`tokenlake.directory.ring`) follows from it. The functions
that change a record return a new one with the next epoch; the membership writes it only if the stored record is still
the one that was read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import msgspec

from tokenlake.identity import NodeId

UNIT_SHARE = 128
"""Virtual nodes of a member of mean weight in a new record; the standard deviation of its share of the keys is then
about 9 % (1 / sqrt(128))."""
MAX_EPOCH = 1 << 62
"""Bound of the epoch of a record."""


class Member(msgspec.Struct, frozen=True):
    """One node of the cluster."""

    weight: int
    """Weight on the ring: bytes of the node's memory."""
    draining: bool = False
    """True while the node hands its primary copies over, before it leaves. It is on the ring no more."""


class RingRecord(msgspec.Struct, frozen=True):
    """The members of a cluster at one epoch. Immutable. Raises ValueError where a field is out of range."""

    epoch: int
    """Number of changes since the record was created; 0 for a static list."""
    unit: float
    """Weight of one virtual node. It never changes, so that a node that joins takes only what belongs to it."""
    members: Mapping[str, Member]

    def __post_init__(self) -> None:
        if (
            not 0 <= self.epoch < MAX_EPOCH
            or not 0 < self.unit < math.inf
            or any(member.weight <= 0 for member in self.members.values())
        ):
            raise ValueError("a ring record needs an epoch from 0 to 2^62, a positive unit and positive weights")

    @classmethod
    def of(cls, weights: Mapping[str, int], epoch: int = 0) -> RingRecord:
        """A new record of members with these weights. Its unit gives a member of mean weight `UNIT_SHARE` virtual
        nodes."""
        unit = sum(weights.values()) / (UNIT_SHARE * len(weights)) if weights else 1.0
        return cls(epoch, unit, {name: Member(weight) for name, weight in sorted(weights.items())})

    def with_member(self, name: str, weight: int) -> RingRecord:
        """The record of the next epoch in which `name` is a member that does not drain; this record if it is one
        already."""
        return self._with({**self.members, name: Member(weight)})

    def draining(self, name: str) -> RingRecord:
        """The record of the next epoch in which the member `name` drains; this record if it drains already. Raises
        KeyError if it is no member."""
        return self._with({**self.members, name: Member(self.members[name].weight, draining=True)})

    def without(self, name: str) -> RingRecord:
        """The record of the next epoch without the member `name`; this record if it is no member."""
        return self._with({each: member for each, member in self.members.items() if each != name})

    def _with(self, members: Mapping[str, Member]) -> RingRecord:
        if members == self.members:
            return self
        return RingRecord(self.epoch + 1, self.unit, dict(sorted(members.items())))

    def weights(self) -> dict[NodeId, int]:
        """The weights of the members on the ring: those that do not drain, or all members where all of them drain."""
        staying = {name: member for name, member in self.members.items() if not member.draining} or self.members
        return {NodeId(name): member.weight for name, member in staying.items()}

    def digest(self) -> int:
        """A number of 63 bits that is equal for records with the same ring. Two nodes that name the same epoch and
        different digests were configured with different lists."""
        text = msgspec.msgpack.encode([self.unit, sorted(self.weights().items())])
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
