"""The messages between the scheduler's side and the ranks: the plan of a step, and a rank's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenlake.hints import Hints

__all__ = ["LoadPlan", "LoadTime", "SavePlan", "StepPlan", "StepReport"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tokens [start, stop) of a request, to be copied from the segments of a lease into its blocks."""

    request: str
    lease: int
    incarnation: int
    """The incarnation of the daemon that granted the lease: after a restart the number may name another lease."""
    start: int
    """A multiple of the block size, as is `stop`."""
    stop: int
    blocks: tuple[int, ...]
    """The blocks of these tokens, in order."""
    local: bool
    """All segments lie in this node's arena: the load needs no transfer."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Segments [first, first + number of keys) of one prompt. All their tokens are computed when the step ends."""

    job: int
    """Job numbers begin with 1 and increase; the ranks execute the jobs in this order."""
    request: str
    first: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """The blocks of all tokens of these segments, in order."""
    write: int = 0
    """The reservation whose slots the ranks fill, each its own shards; 0: the only rank reserves the slots."""
    incarnation: int = 0
    """The incarnation of the daemon that granted the reservation."""
    hints: Hints | None = None
    """The request's hints, where the rank reserves the slots."""
    marked: bool = False
    """The segments have in-flight markers, where the rank reserves the slots: it removes those of refused segments."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine."""

    step: int
    session: int = 0
    """The scheduler's session at the daemon, which the ranks join; 0 while there is none."""
    incarnation: int = 0
    """The incarnation of the daemon of this session."""
    wait: bool = False
    """The step computes with the blocks that `loads` fill."""
    idle: bool = False
    """The step computes nothing."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    reused: tuple[int, ...] = ()
    """The jobs whose blocks were handed out again: these blocks must not be read once the step has begun."""
    held: tuple[tuple[str, int], ...] = ()
    """(request, job): finished requests whose blocks are kept until the job is done."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The duration of one load, from the moment the rank began it."""

    fetch_s: float
    """Until the segments were in this node's arena."""
    copy_s: float
    """The remaining time, until they were in the blocks."""
    lost: int = 0
    """The number of segments that were lost or arrived too late."""

    def slower(self, other: LoadTime) -> LoadTime:
        """The time of the slower of two ranks, with the larger loss of both."""
        slower = max(self, other, key=lambda time: time.fetch_s + time.copy_s)
        return replace(slower, lost=max(self.lost, other.lost))


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one rank, or the combined report of several ranks."""

    step: int
    done: int
    """The jobs up to this one read no block any more."""
    serves: bool = True
    """False: the rank cannot read or write the cache, now or later."""
    computed: Mapping[int, float] = field(default_factory=dict)
    """By step, the seconds of the forward passes that were measured since the last report."""
    loaded: Mapping[str, LoadTime] = field(default_factory=dict)
    """By request, the loads that ended since the last report."""

    def merged(self, other: StepReport) -> StepReport:
        """What both ranks have done, with the longer of their times."""
        computed, loaded = dict(self.computed), dict(self.loaded)
        for step, seconds in other.computed.items():
            computed[step] = max(seconds, computed.get(step, 0.0))
        for request, time in other.loaded.items():
            loaded[request] = time.slower(loaded.get(request, time))
        serves = self.serves and other.serves
        return StepReport(min(self.step, other.step), min(self.done, other.done), serves, computed, loaded)
