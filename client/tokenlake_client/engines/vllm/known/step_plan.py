"""The messages between the scheduler's side and the ranks, which vLLM transports: the plan of a step, and a rank's
report. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenlake.hints import Hints
from tokenlake_client.engines.vllm.adapters import AdapterUse
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.engines.vllm.parts import Part


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load: tokens [start, stop) of a request are copied from the segments of a lease into the request's blocks."""

    request: str
    leases: tuple[int, ...]
    """The numbers of the lease's parts (`Lease.ids`); empty: nothing can be loaded."""
    incarnation: int
    """The incarnation of the daemon that granted the lease: after a restart the lease's number may name another lease.
    """
    start: int
    """The index of the first token of the request to load, a multiple of the block size."""
    stop: int
    """The load ends before this token. Where that is within a block, the last segment is the tail of the prompt, or
    has all tokens of that block."""
    blocks: tuple[int, ...]
    """The numbers of vLLM's blocks into which these tokens are copied, in order."""
    local: bool
    """True: all segments of the load lie in this node's arena, so the load needs no transfer."""
    at_most_s: float = 0.0
    """Limit in seconds of the load's transfers (`fetch_limit_s`); 0: none."""
    adapter: AdapterUse | None = None
    """The LoRA adapter that the segments were computed with."""

    def parts(self, segment: int, block: int) -> list[Part]:
        """The blocks of the load by segment. `segment`, `block`: their numbers of tokens."""
        parts, at = [], 0
        for index in range(self.start // segment, -(-self.stop // segment)):
            first, last = max(self.start, index * segment), min(self.stop, (index + 1) * segment)
            count = -(-(last - first) // block)
            parts.append(Part(index, 0, (first - index * segment) // block, self.blocks[at : at + count]))
            at += count
        return parts


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A save: segments [first, first + number of keys) of one prompt are stored. All their tokens are computed when the
    step ends."""

    job: int
    """The number of the save job. Numbers begin with 1 and increase; the ranks execute the jobs in this order."""
    request: str
    first: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """The numbers of vLLM's blocks that hold all tokens of these segments, in order."""
    write: int = 0
    """The number of the reservation whose slots the ranks fill, each rank its own shards; 0: one rank fills whole
    segments, and reserves the slots itself."""
    incarnation: int = 0
    """The incarnation of the daemon that granted the reservation of the slots."""
    hints: Hints | None = None
    """The request's hints, which a rank that reserves the slots itself sends along."""
    marked: bool = False
    """True: the segments have in-flight markers, and the rank, which reserves the slots itself, must remove those of
    segments that the pool refuses."""
    adapter: AdapterUse | None = None
    """The LoRA adapter that the keys name."""
    contents: tuple[bytes, ...] = ()
    """The contents of the segments for routers, which a rank that reserves the slots itself sends along; empty where
    the daemon does not publish them."""
    tail: int = 0
    """The number of tokens of the segment, if it is the tail of a prompt, which is the only one of its job; 0: each
    segment is full."""

    @property
    def parts(self) -> list[Part]:
        """The blocks of the save by segment."""
        count = len(self.blocks) // len(self.keys)
        return [Part(at, 0, 0, self.blocks[at * count : (at + 1) * count]) for at in range(len(self.keys))]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step of the engine, for each rank."""

    step: int
    session: int = 0
    """The number of the scheduler's session at the daemon, which the ranks join; 0 while there is none."""
    incarnation: int = 0
    """The incarnation of the daemon that has the scheduler's session."""
    idle: bool = False
    """True: the step computes no tokens."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    reused: tuple[int, ...] = ()
    """The save jobs whose blocks vLLM gave to other requests: the ranks must not read these blocks once the step has
    begun."""
    held: tuple[tuple[str, int], ...] = ()
    """For each finished request whose blocks vLLM keeps: (the request's name, the number of the save job that ends the
    wait)."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one rank, or the combined report of several ranks."""

    done: int
    """The number of the newest save job such that this job and all earlier ones read no block any more."""
    serves: bool = True
    """False: the rank cannot read or write vLLM's cache, so the scheduler's side stops using the pool."""
    computed: Mapping[int, float] = field(default_factory=dict)
    """The measured seconds of forward passes, by step, that became known since the last report."""
    loaded: Mapping[str, LoadTime] = field(default_factory=dict)
    """The times of the loads that ended since the last report, by request."""

    def merged(self, other: StepReport) -> StepReport:
        """One report for both ranks: it states the work that both have done, and the longer of their times."""
        computed, loaded = dict(self.computed), dict(self.loaded)
        for step, seconds in other.computed.items():
            computed[step] = max(seconds, computed.get(step, 0.0))
        for request, time in other.loaded.items():
            loaded[request] = time.slower(loaded.get(request, time))
        serves = self.serves and other.serves
        return StepReport(min(self.done, other.done), serves, computed, loaded)
