"""Another node's agent, as this node knows it, and the memory by which nodes prove that they can read each other."""

from __future__ import annotations

import mmap
import os

import xxhash

from tokenlake.wire import peer
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.places import HOST
from tokenlake_server.nixl.agent import Span
from tokenlake_server.nixl.read import address_of


class Remote:
    """The agent of another node, as this node knows it."""

    def __init__(self, told: peer.MemoryAgent, before: Remote | None) -> None:
        self.told = told
        self.met = False
        """True if this node's agent has loaded the description that the other node sent."""
        self.proven: bool = before is not None and before.proven and before.told.agent == told.agent
        """True if the last probe, or read, from the agent succeeded."""
        self.probe_at = 0.0
        self.failures: int = before.failures if before is not None else 0
        """Number of failed probes and reads since the last one that succeeded."""

    @property
    def ready(self) -> bool:
        """True if segments can be read."""
        return self.met and self.proven


class ProbeMemory:
    """The bytes that probes of other nodes read, then those that this node's last probe has read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 2 * peer.PROBE_BYTES)
        self._map[: peer.PROBE_BYTES] = os.urandom(peer.PROBE_BYTES)
        self.checksum = _checksum(self._map[: peer.PROBE_BYTES])
        """Of the bytes that other nodes read."""
        start = address_of(self._map)
        self.span: Span = (start, len(self._map), HOST)
        """All of it, for an agent."""
        self.source: Span = (start, peer.PROBE_BYTES, HOST)
        self.sink: Span = (start + peer.PROBE_BYTES, peer.PROBE_BYTES, HOST)

    def received(self) -> bytes:
        """Checksum of the bytes that the last probe has read."""
        return _checksum(self._map[peer.PROBE_BYTES :])


def _checksum(probe: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(probe).to_bytes(CHECKSUM_BYTES, "little")
