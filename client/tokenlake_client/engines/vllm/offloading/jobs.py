"""The messages from the manager, in vLLM's scheduler, to the workers on the ranks: what a job loads or stores. vLLM
transports them. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass

from tokenlake.hints import Hints
from tokenlake_client.engines.vllm.adapters import AdapterUse


@dataclass(frozen=True, slots=True)
class Member:
    """The session at the daemon that a rank joins to execute a job."""

    session: int
    """The number of the session; 0: there is none, and the job fails."""
    incarnation: int
    """The incarnation of the daemon: after a restart, the numbers of leases and writes may name others."""
    layout: bytes
    """The encoded layout, which the manager knows from the reports of all ranks."""
    shard_bytes: int
    """The size of a rank's shard of a segment."""


NOWHERE = Member(0, 0, b"", 0)
"""There is no session."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Chunks to be loaded into blocks of one request."""

    member: Member
    request: str
    leases: tuple[int, ...]
    """The numbers of the lease's parts (`MatchedLease.ids`)."""
    segments: tuple[int, ...]
    """For each chunk of the job, the index of its segment in the lease; -1: it has none."""
    groups: tuple[int, ...]
    """For each chunk of the job, the number of its cache group."""
    adapter: AdapterUse | None = None
    """The request's LoRA adapter."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Chunks to be stored from blocks of one request."""

    member: Member
    request: str
    keys: tuple[bytes, ...]
    """The segment key of each chunk of the job."""
    groups: tuple[int, ...]
    """For each chunk of the job, the number of its cache group."""
    write: int = 0
    """The number of the reservation whose slots the ranks fill, each rank its own shard; 0: one rank fills whole
    segments, and reserves the slots itself."""
    hints: Hints | None = None
    """The request's hints, which a rank that reserves the slots itself sends along."""
    adapter: AdapterUse | None = None
    """The request's LoRA adapter."""
