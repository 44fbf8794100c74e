"""The result of a call for one key. A message carries one byte per key."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """The result of a call (match, fetch, prepare, lookup and others) for one key."""

    # LOCAL to UNKNOWN are ordered: where several nodes answer for a key, the lowest code counts.
    LOCAL = 1
    """To engines: leased, in this node's arena; the slot is in the reply. Between nodes: the sender has the segment, in
    memory (leased) or on disk (held for some seconds)."""
    REMOTE = 2
    """Leased at another node, or on a disk of this one: a fetch brings the segment to this node's memory."""
    DEFERRED = 3
    """The owner is sending the segment to other readers now, and serves a lookup that follows soon. Not leased."""
    PENDING = 4
    """In flight: an engine is computing the segment."""
    MISSING = 5
    """No node has the segment, and no engine is known to compute it."""
    UNKNOWN = 6
    """The key's directory node does not answer, or does not know yet which segments other nodes have."""
    LOST = 7
    """The segment was leased and is gone, or did not arrive whole within the deadline."""
    ELSEWHERE = 8
    """Between nodes: the directory node's reply names the node that has the segment."""

    RESERVED = 16
    """The reply has a slot for the segment, to fill and then commit."""
    EXISTS = 17
    """The node has the segment already, so no slot is reserved for it."""
    COMMITTED = 18
    """The segment is published: readers find it from now on."""
    EXPIRED = 19
    """The reservation's deadline passed, or the session ended: nothing was published."""

    NO_SLOT = 32
    """Refused: every slot is leased, being written or in quarantine."""
    WRITE_BUDGET = 33
    """Refused: the bound on segments that are being written is reached; a later attempt may succeed."""
    SESSION_LIMIT = 34
    """Refused: the session's bound on leased or reserved slots is reached; a later attempt may succeed."""
    NO_REGION = 35
    """Refused: the tenant has no region of this slot size, and no free memory is left; a later attempt may succeed,
    because memory is being prepared, or moves to the tenant."""
    BAD_CHECKSUM = 36
    """Refused: the bytes that arrived have a wrong checksum."""
    NOT_ADMITTED = 37
    """Refused: memory is full, and every possible victim has a higher retention value."""
    QUOTA = 38
    """Refused: the tenant's quota of this node's memory is used, and no segment of it can be evicted now."""

    @staticmethod
    def first_passing(codes: bytes | bytearray) -> int:
        """Returns the index of the first refusal for want of memory, which may pass within moments, when writes and
        leases end or memory comes; -1 without one."""
        wants = (Code.NO_SLOT, Code.WRITE_BUDGET, Code.SESSION_LIMIT, Code.NO_REGION, Code.QUOTA)
        found = (codes.find(code) for code in wants)
        return min((at for at in found if at >= 0), default=-1)

    @property
    def refused(self) -> bool:
        """The call could not be served for this key; the code is the reason."""
        return self >= Code.NO_SLOT
