"""What the page shows of the past: rates of some counters, and changes of states. A small sample is taken at equal
intervals, also while no browser looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from tokenlake.core.cluster.serve import SENT_BYTES
from tokenlake.core.cluster.transfers import ARRIVED_BYTES
from tokenlake.core.engines.write import STORED
from tokenlake.core.report.account import ENGINE_HAD, SUPPLIED
from tokenlake.core.report.misses import MISSED
from tokenlake.memory.store import EVICTED
from tokenlake_server.page.document import PageEvent, PageHistory

STEP_S = 5.0
"""Seconds between two samples."""
MAX_SAMPLES = 361
"""Samples that are kept: half an hour."""
MAX_EVENTS = 256
MERGED_S = 60.0
"""Limit of the seconds that one event about segments covers."""
MAX_TEXT = 500
MAX_NAMES = 8
"""Names of nodes in one event."""
COUNTED = (SUPPLIED, ENGINE_HAD, MISSED, SENT_BYTES, ARRIVED_BYTES, STORED, EVICTED)
"""The counters of a sample. The first five are those of `PageHistory`, in its order."""
_AT_STORED, _AT_EVICTED = 5, 6
What = Literal["start", "ring", "peer", "membership", "engines", "disk", "segments"]


class Sample(NamedTuple):
    """The state at one moment. Taken on the control loop."""

    at: float
    """Seconds of the monotonic clock."""
    at_s: float
    """Seconds since 1970."""
    counts: tuple[int, ...]
    """The values of `COUNTED`."""
    epoch: int
    members: frozenset[str]
    peers: Mapping[str, tuple[str, str]]
    """By name of another member: its state and the reason."""
    engines: int
    problem: str
    """The problem of the membership; empty if there is none."""
    disks: Mapping[str, tuple[bool, str]]
    """By path of a device: True while it serves, and its problem."""


class History:
    """The newest samples, and the events that follow from them. Used in one thread."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._counts: deque[tuple[float, float, tuple[int, ...]]] = deque(maxlen=MAX_SAMPLES)
        """`at`, `at_s` and `counts` of each sample: the states of a hundred peers would take megabytes."""
        self._newest: Sample | None = None
        self._events: deque[PageEvent] = deque(maxlen=MAX_EVENTS)
        self._merged = 0, 0
        """The segments that the newest event counts, if it is about segments."""

    def add(self, sample: Sample) -> None:
        """Keep a sample, and note what changed since the one before."""
        if self._newest is None:
            self._note(sample, "start", f"node '{self._node}' runs, epoch {sample.epoch} of the ring")
        else:
            self._compare(self._newest, sample)
        self._newest = sample
        self._counts.append((sample.at, sample.at_s, sample.counts))

    def rates(self) -> PageHistory:
        """The rates between the samples."""
        columns: list[list[float]] = [[], [], [], [], []]
        for (began, _, earlier), (ended, _, later) in pairwise(self._counts):
            seconds = max(ended - began, 1e-3)
            for column, before, now in zip(columns, earlier, later, strict=False):
                column.append(round((now - before) / seconds, 1))
        supplied, engine_had, missed, sent, received = columns
        return PageHistory(
            end_s=[round(at_s, 1) for _, at_s, _ in self._counts][1:],
            supplied=supplied,
            engine_had=engine_had,
            missed=missed,
            sent=sent,
            received=received,
        )

    def events(self, most: int, *, of_all: bool) -> list[PageEvent]:
        """The newest events, the newest first. `of_all`: those about segments too, which count all tenants."""
        found = [each for each in reversed(self._events) if of_all or each.what != "segments"]
        return found[:most]

    # -- events

    def _compare(self, before: Sample, now: Sample) -> None:
        if before.epoch != now.epoch:
            parts = [f"epoch {now.epoch} of the ring, {len(now.members)} nodes"]
            parts += _listed("joined", now.members - before.members)
            parts += _listed("left", before.members - now.members)
            self._note(now, "ring", "; ".join(parts))
        for name, (state, reason) in now.peers.items():
            if before.peers.get(name, ("", ""))[0] != state:
                text = f"'{name}' is {'connected' if state == 'connected' else _why(state, reason)}"
                self._note(now, "peer", text, warning=state != "connected")
        if before.problem != now.problem:
            text = now.problem or "the members are known again"
            self._note(now, "membership", text, warning=bool(now.problem))
        if before.engines != now.engines:
            self._note(now, "engines", f"{now.engines:,} engines, before {before.engines:,}")
        for path, (serving, problem) in now.disks.items():
            if before.disks.get(path) != (serving, problem):
                state = "serves" if serving else "does not serve"
                self._note(now, "disk", f"{path} {_why(state, problem)}", warning=bool(problem))
        stored = now.counts[_AT_STORED] - before.counts[_AT_STORED]
        evicted = now.counts[_AT_EVICTED] - before.counts[_AT_EVICTED]
        if stored or evicted:
            self._segments(before, now, stored, evicted)

    def _segments(self, before: Sample, now: Sample, stored: int, evicted: int) -> None:
        """Note the segments that came and went, in one event with those of the intervals just before."""
        last = self._events[-1] if self._events else None
        begin = before.at_s
        if last is not None and last.what == "segments" and now.at_s - last.at_s <= MERGED_S:
            more = self._merged
            stored, evicted, begin = stored + more[0], evicted + more[1], last.at_s
            self._events.pop()
        self._merged = stored, evicted
        text = f"{stored:,} segments stored, {evicted:,} evicted"
        self._events.append(
            PageEvent(at_s=begin, until_s=now.at_s, what="segments", severity="info", text=text),
        )

    def _note(self, sample: Sample, what: What, text: str, *, warning: bool = False) -> None:
        event = PageEvent(
            at_s=sample.at_s,
            until_s=sample.at_s,
            what=what,
            severity="warning" if warning else "info",
            text=text[:MAX_TEXT],
        )
        self._events.append(event)


def _why(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state


def _listed(verb: str, names: Iterable[str]) -> Sequence[str]:
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return [f"{verb}: {', '.join(found[:MAX_NAMES])}{more}"] if found else []
