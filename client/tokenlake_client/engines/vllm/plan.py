"""What the scheduler's side tells the ranks in each step, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenlake.hints import Hints

__all__ = ["LoadPlan", "LoadTime", "SavePlan", "StepPlan", "StepReport"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tokens [start, stop) of a request, from the segments of a lease into its blocks."""

    request: str
    lease: int
    incarnation: int
    """Of the daemon that granted the lease: after a restart the number may be another lease's."""
    start: int
    """A multiple of the block size, as is `stop`."""
    stop: int
    blocks: tuple[int, ...]
    """Of these tokens, in order."""
    here: bool
    """All of it lies in this node's arena: no transfer is needed."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Segments [first, first + number of keys) of one prompt, all of whose tokens are computed when this step ends."""

    job: int
    """Counts up from 1 within a session of plans; the ranks do jobs in this order."""
    request: str
    first: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """Of all tokens of these segments, in order."""
    write: int = 0
    """The reservation whose slots the ranks fill, each its shards; 0: the one rank reserves them."""
    incarnation: int = 0
    """Of the daemon that granted it."""
    hints: Hints | None = None
    """Of the request, where the rank reserves the slots."""
    claimed: bool = False
    """Others wait for it, where the rank reserves the slots: what is refused it takes back."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine."""

    step: int
    session: int = 0
    """The scheduler's session at the daemon, which the ranks join; 0 while it has none."""
    incarnation: int = 0
    """Of the daemon that the session is at."""
    wait: bool = False
    """The step needs what `loads` bring."""
    idle: bool = False
    """The step computes nothing."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    reused: tuple[int, ...] = ()
    """Jobs whose blocks were handed out again: nothing may be read from those blocks once this step began."""
    held: tuple[tuple[str, int], ...] = ()
    """Finished requests whose blocks are kept until the job is done: (request, job)."""


@dataclass(frozen=True, slots=True)
class LoadTime:
    """What one load took, once it began."""

    fetch_s: float
    """Until the segments were in this node's arena."""
    copy_s: float
    """The rest: until they were in the blocks."""
    lost: int = 0
    """Segments that did not come, or not in time."""

    def longer(self, other: LoadTime) -> LoadTime:
        """What the slower of two ranks took."""
        slower = max(self, other, key=lambda took: took.fetch_s + took.copy_s)
        return replace(slower, lost=max(self.lost, other.lost))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's answer, or what several ranks' answers have in common."""

    step: int
    done: int
    """All jobs up to this one have let go of their blocks."""
    serves: bool = True
    """False: this rank cannot read or write the cache, and never will."""
    computed: Mapping[int, float] = field(default_factory=dict)
    """Seconds of the forward passes, by step, that were measured since the last report."""
    loaded: Mapping[str, LoadTime] = field(default_factory=dict)
    """By request, the loads that ended since the last report."""

    def merged(self, other: StepReport) -> StepReport:
        """What both have done; of times the longer ones."""
        computed, loaded = dict(self.computed), dict(self.loaded)
        for step, seconds in other.computed.items():
            computed[step] = max(seconds, computed.get(step, 0.0))
        for request, took in other.loaded.items():
            loaded[request] = took.longer(loaded.get(request, took))
        serves = self.serves and other.serves
        return StepReport(min(self.step, other.step), min(self.done, other.done), serves, computed, loaded)
