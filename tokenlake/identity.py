"""Types that carry identity, so that one kind of name is never passed for another."""

from __future__ import annotations

from typing import NewType

SegmentKey = NewType("SegmentKey", bytes)
"""32 bytes: blake2b-256 chained over a prompt prefix (`tokenlake.keys`)."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes: blake2b-256 of a layout (`tokenlake.layout`)."""

TenantId = NewType("TenantId", str)
"""Name of a tenant. It comes from the credential, never from a request body."""

NodeId = NewType("NodeId", str)
"""Configured name of a node; survives restarts and changes of address."""

Incarnation = NewType("Incarnation", int)
"""Number of one run of a node's daemon; grows with every start."""

ConnectionId = NewType("ConnectionId", int)
"""One connection to the daemon's local socket; stands for one process of a session."""

SessionId = NewType("SessionId", int)
"""One engine as the daemon knows it; several processes may join it."""

LeaseId = NewType("LeaseId", int)
"""One lease: the promise of a node not to evict the segments that a match found there."""

WriteId = NewType("WriteId", int)
"""One reservation of slots, from prepare to commit or abort."""
