"""Weighs the time of loading a hit against that of computing it, both as measured while the engine serves. Imports no
engine.

vLLM computes the end of a prompt, not its middle, so a load covers the hit up to the end of one of its segments::

    0      local      stop                 hit           total
    |------|------------|-------------------|--------------|
    | vLLM | loaded     | found, not loaded | computed     |
           |  seconds of loading            |
                        |    seconds of prefill            |   the stop with the smallest sum is chosen
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenlake.identity import NodeId
from tokenlake.planner import PrefillFit, Rates, TransferFit, fetch_limit_s
from tokenlake.planner.fits import ENOUGH
from tokenlake_client.engines.vllm.load_worker import LoadTime

HERE = ""
"""The name that stands for this node among the nodes from which a hit is loaded."""
RETRY_S = 60.0
"""Seconds: after this time without a load from a node, one hit is loaded from it even if the prediction says that
computing is faster, because the node may have become faster."""
FAR = 2.0
"""A measured load time that is this many times longer or shorter than predicted counts as a surprise."""
MAX_STEPS = 16
"""Limit of the engine's steps whose measured time is awaited; older steps are forgotten."""


class Owner(NamedTuple):
    """The node from which a segment is loaded."""

    node: str
    """Name of the node; `HERE` for this one."""
    disk_s: float = 0.0
    """The expected seconds until the node has read the segment from its disk; 0: it is in memory."""


LOCAL = Owner(HERE)
"""The owner of a segment in this node's memory."""


def all_local(owners: Sequence[Owner]) -> bool:
    """True if all segments of a load are in this node's memory. `owners`: the owner of each segment."""
    return all(owner == LOCAL for owner in owners)


def remote_tokens(owners: Sequence[Owner], start: int, stop: int, segment: int) -> int:
    """The number of the tokens [start, stop) of a prompt in segments of other nodes, or on a disk. `owners`: that of
    each of the segments that have these tokens. `segment`: the number of tokens of a segment."""
    first = start // segment
    return sum(
        min(stop, (index + 1) * segment) - max(start, index * segment)
        for index, owner in enumerate(owners, first)
        if owner != LOCAL
    )


class LoadCosts:
    """Predicts the time of loads and prefills, and chooses how much of a hit is loaded. Not thread-safe."""

    def __init__(self, rates: Rates, segment_tokens: int, segment_bytes: int, clock: Callable[[], float]) -> None:
        """`rates`: the measured speeds from which the times are predicted; this object adds the measured times of
        loads to them."""
        self._rates = rates
        self._segment = segment_tokens
        self._bytes = segment_bytes
        self._clock = clock
        self._tried: dict[str, float] = {}
        """By node, the time of the last load from it that was made whatever the prediction said."""
        self._surprises: dict[str, int] = {}
        """By node, the number of its latest measured loads in a row whose time was a surprise: `FAR` times longer or
        shorter than predicted."""

    def cheapest_stop(self, owners: Sequence[Owner], start: int, until: int, total: int) -> int:
        """The token up to which a hit, tokens [start, until) of a prompt of `total` tokens, should be loaded; `start`
        where no load is faster than computing. `owners`: that of each segment of the hit.

        Returns `until` while the time of a prefill is not known. A source with too few measurements is predicted to
        take no time, so that it is used and measured.
        """
        first, last = start // self._segment, -(-until // self._segment)
        needed = owners[first:last]
        if not needed or not self._rates.prefill.known:
            return until
        stop = self._search(needed, start, until, total, self._rates.prefill)
        return until if stop < until and self._retry(needed) else stop

    def prefill_s(self, total: int, local: int) -> float | None:
        """The predicted time to compute a prompt behind its first `local` tokens; None while it is not known."""
        fit = self._rates.prefill
        return fit.seconds(total - local, local) if fit.known else None

    def saved_s(self, total: int, start: int, stop: int) -> float:
        """The predicted time that the load of tokens [start, stop) of a prompt of `total` tokens saves; 0 while it is
        not known."""
        fit = self._rates.prefill
        return max(0.0, fit.seconds(total - start, start) - fit.seconds(total - stop, stop)) if fit.known else 0.0

    def fetch_limit_s(self, start: int, stop: int) -> float:
        """The limit in seconds of the transfers of tokens [start, stop) of a prompt; 0: none."""
        return fetch_limit_s(self._rates.prefill, start, stop)

    def pays(self, total: int) -> bool:
        """True if a load of all segments of a prompt of `total` tokens, from the slowest known node, is faster than
        computing them. Requires that `prefill_s` is known."""
        until = total - total % self._segment
        nbytes = until // self._segment * self._bytes
        begin, byte_s = self._coefficients(HERE)
        prefill = self._rates.prefill
        load_s = begin + byte_s * nbytes + self._rates.slowest_fetch_s(nbytes)
        return load_s <= prefill.seconds(total, 0) - prefill.seconds(total - until, until)

    def add_load(self, owners: Sequence[Owner], time: LoadTime) -> None:
        """Add the measured time of a load. `owners`: that of each of its segments.

        A load that lost segments was ended by its deadline. Its fetch time is extrapolated: multiplied by the number of
        all segments / (number of fetched segments + 1). The result is a sample only if it is longer than predicted.
        Without such samples, nodes that always miss the deadline would never be measured. A load that read from a disk
        is no sample: the time of the disk is no part of these predictions.
        """
        if any(owner.disk_s for owner in owners):
            return
        now = self._clock()
        nodes = Counter(owner.node for owner in owners)
        remote = {node: count * self._bytes for node, count in nodes.items() if node != HERE}
        if not time.lost:
            self._add(HERE, len(owners) * self._bytes, time.copy_s + (0.0 if remote else time.fetch_s), now)
        # All nodes sent at the same time, so the share of each node in the fetch time is not known: the time is divided
        # among them in proportion to the predictions.
        expected = {node: self._fit(node).seconds(part) + 1e-12 * part for node, part in remote.items()}
        fetch_s = time.fetch_s * len(owners) / min(len(owners), len(owners) - time.lost + 1)
        ratio = fetch_s / sum(expected.values()) if remote else 0.0
        if not time.lost or ratio > 1:
            for node, part in remote.items():
                self._add(node, part, ratio * expected[node], now)

    def _search(self, owners: Sequence[Owner], start: int, until: int, total: int, prefill: PrefillFit) -> int:
        best, least = start, prefill.seconds(total - start, start)
        seconds, copy_byte_s = self._coefficients(HERE)
        byte_s = {HERE: copy_byte_s}
        for index, (node, disk_s) in enumerate(owners, start // self._segment):
            if node not in byte_s:
                begin, fetch_byte_s = self._coefficients(node)
                seconds += begin
                byte_s[node] = fetch_byte_s + copy_byte_s
            seconds += byte_s[node] * self._bytes + disk_s
            stop = min((index + 1) * self._segment, until)
            cost = seconds + prefill.seconds(total - stop, stop)
            if cost <= least:
                best, least = stop, cost
        return best

    def _fit(self, source: str) -> TransferFit:
        return self._rates.copy if source == HERE else self._rates.peer(NodeId(source)).fetch

    def _coefficients(self, source: str) -> tuple[float, float]:
        """The predicted seconds to begin a transfer from the node `source`, and the predicted seconds per byte; zeros
        for a node with too few measurements."""
        fit = self._fit(source)
        if not fit.known:
            return 0.0, 0.0
        begin, per_byte = fit.coefficients
        return begin, per_byte

    def _add(self, source: str, nbytes: int, seconds: float, now: float) -> None:
        """Add a measured transfer from `source`. If the speed of a source has changed, its old samples would dominate
        the prediction for a long time. They are forgotten when the first sample after a pause of `RETRY_S` is `FAR`
        times shorter than predicted, or when `ENOUGH` samples in a row are surprises.
        """
        fit = self._fit(source)
        expected, age = fit.seconds(nbytes), fit.age(now)
        if age is not None and age > RETRY_S and seconds < expected / FAR:
            fit.forget()
        fit.add(nbytes, seconds, now)
        surprise = not expected / FAR <= seconds <= expected * FAR
        self._surprises[source] = self._surprises.get(source, 0) + 1 if surprise else 0
        if self._surprises[source] >= ENOUGH:
            fit.forget(keep=ENOUGH)
            self._surprises[source] = 0

    def _retry(self, owners: Sequence[Owner]) -> bool:
        """True if one of the sources has been neither used nor retried for `RETRY_S`. The caller then loads from it,
        and this method has recorded the retry."""
        now = self._clock()
        found = False
        for source in {HERE: None, **dict.fromkeys(owner.node for owner in owners)}:
            age = self._fit(source).age(now)
            if age is not None and age > RETRY_S and now - self._tried.get(source, -math.inf) > RETRY_S:
                self._tried[source] = now
                found = True
        return found


class PrefillSteps:
    """Chooses the engine's steps whose time counts as a measured prefill time: those with at least half of their tokens
    in prompts. A request that decodes in such a step counts as a prefill of one token, because all terms of the fit are
    sums over the requests of a step. For the scheduler's thread."""

    def __init__(self, fit: PrefillFit, clock: Callable[[], float]) -> None:
        self._fit = fit
        self._clock = clock
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def begin(self, step: int, parts: Sequence[Any]) -> None:
        """Record that `step` computes these parts, one per request; `end` then records its duration."""
        prompts = sum(part.new for part in parts if part.new > 1)
        if prompts and 2 * prompts >= sum(part.new for part in parts):
            self._steps[step] = [(part.new, part.computed) for part in parts]
            if len(self._steps) > MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def end(self, step: int, seconds: float) -> None:
        """Record that the engine's step `step` took `seconds`. Only the first call for a step counts."""
        parts = self._steps.pop(step, None)
        if parts is not None:
            self._fit.add_step(parts, seconds, self._clock())
