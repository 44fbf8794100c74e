"""How much of what the pool has of a prompt is worth loading: what would take longer to bring than to compute is not.

A prompt's end is computed, not its middle, so what is loaded is the part of the hit up to one of its segments. ::

    0      local      stop                 hit           total
    |------|------------|-------------------|--------------|
    | vLLM | loaded     | found, and skipped| computed     |
           |  seconds of loading            |
                        |    seconds of prefill            |   the sum is the least of all stops
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from tokenlake.identity import NodeId
from tokenlake.planner import PrefillFit, Rates, TransferFit
from tokenlake.planner.fits import ENOUGH
from tokenlake_client.engines.vllm.lookup import HERE
from tokenlake_client.engines.vllm.plan import LoadTime

__all__ = ["RETRY_S", "Loads"]

RETRY_S = 60.0
"""A source that nothing was loaded from for so long may have changed: one hit of it is loaded in any case."""
FAR = 2.0
"""Times, or a part, of what was expected."""


class Loads:
    """What loads take, and what they are worth. Not thread-safe."""

    def __init__(self, rates: Rates, segment_tokens: int, segment_bytes: int, clock: Callable[[], float]) -> None:
        self._rates = rates
        self._segment = segment_tokens
        self._bytes = segment_bytes
        self._clock = clock
        self._tried: dict[str, float] = {}
        """When a hit was loaded in any case, by source; as many as there are nodes."""
        self._surprises: dict[str, int] = {}
        """Samples in a row that were far off, by source."""

    def worth(self, owners: Sequence[str], start: int, until: int, total: int) -> int:
        """The token up to which a load pays that would fill the tokens `start` to `until` of a prompt of `total`;
        `start` where none of it does. `owners`: the node of each segment of the hit, or `HERE`.

        All of it while the prefill's time is not known. A source that was read too seldom counts nothing, so that it is
        read and measured.
        """
        first, last = start // self._segment, -(-until // self._segment)
        needed = owners[first:last]
        if not needed or not self._rates.prefill.known:
            return until
        stop = self._cheapest(needed, start, until, total, self._rates.prefill)
        return until if stop < until and self._try_again(needed) else stop

    def prefill_s(self, total: int, local: int) -> float | None:
        """What computing a prompt behind its first `local` tokens is expected to take; None while that is not known."""
        fit = self._rates.prefill
        return fit.seconds(total - local, local) if fit.known else None

    def pays(self, total: int) -> bool:
        """Is loading all segments of a prompt worth it, from the slowest node that is known? Only where the time of its
        prefill is known."""
        until = total - total % self._segment
        nbytes = until // self._segment * self._bytes
        begin, byte_s = self._known(HERE)
        prefill = self._rates.prefill
        load_s = begin + byte_s * nbytes + self._rates.slowest_fetch_s(nbytes)
        return load_s <= prefill.seconds(total, 0) - prefill.seconds(total - until, until)

    def measured(self, owners: Sequence[str], took: LoadTime) -> None:
        """A load of these segments. One that lost some counts as so many times longer as there were more of them than
        came and one, and only where that is more than expected: it met its deadline, and no slow node would ever be
        known by loads that came in time."""
        now = self._clock()
        remote = {owner: count * self._bytes for owner, count in Counter(owners).items() if owner != HERE}
        if not took.lost:
            self._add(HERE, len(owners) * self._bytes, took.copy_s + (0.0 if remote else took.fetch_s), now)
        # All peers sent at once: who was expected to take longer is taken to have.
        expected = {owner: self._fit(owner).seconds(part) + 1e-12 * part for owner, part in remote.items()}
        fetch_s = took.fetch_s * len(owners) / min(len(owners), len(owners) - took.lost + 1)
        longer = fetch_s / sum(expected.values()) if remote else 0.0
        if not took.lost or longer > 1:
            for owner, part in remote.items():
                self._add(owner, part, longer * expected[owner], now)

    def _cheapest(self, owners: Sequence[str], start: int, until: int, total: int, prefill: PrefillFit) -> int:
        best, least = start, prefill.seconds(total - start, start)
        seconds, copy_byte_s = self._known(HERE)
        byte_s = {HERE: copy_byte_s}
        for index, owner in enumerate(owners, start // self._segment):
            if owner not in byte_s:
                begin, fetch_byte_s = self._known(owner)
                seconds += begin
                byte_s[owner] = fetch_byte_s + copy_byte_s
            seconds += byte_s[owner] * self._bytes
            stop = min((index + 1) * self._segment, until)
            cost = seconds + prefill.seconds(total - stop, stop)
            if cost <= least:
                best, least = stop, cost
        return best

    def _fit(self, source: str) -> TransferFit:
        return self._rates.copy if source == HERE else self._rates.peer(NodeId(source)).fetch

    def _known(self, source: str) -> tuple[float, float]:
        """Seconds to begin, and per byte; nothing while it was measured too seldom."""
        fit = self._fit(source)
        if not fit.known:
            return 0.0, 0.0
        begin, per_byte = fit.coefficients
        return begin, per_byte

    def _add(self, source: str, nbytes: int, seconds: float, now: float) -> None:
        """What was true before a change would outweigh what is true now for a long time. So it is forgotten where the
        first sample after a long time is far better, or the newest samples are all far off."""
        fit = self._fit(source)
        expected, age = fit.seconds(nbytes), fit.age(now)
        if age is not None and age > RETRY_S and seconds < expected / FAR:
            fit.forget()
        fit.add(nbytes, seconds, now)
        far = not expected / FAR <= seconds <= expected * FAR
        self._surprises[source] = self._surprises.get(source, 0) + 1 if far else 0
        if self._surprises[source] >= ENOUGH:
            fit.forget(keep=ENOUGH)
            self._surprises[source] = 0

    def _try_again(self, owners: Sequence[str]) -> bool:
        """Was one of the sources neither read nor tried for `RETRY_S`? Then it is tried now."""
        now = self._clock()
        found = False
        for source in {HERE: None, **dict.fromkeys(owners)}:
            age = self._fit(source).age(now)
            if age is not None and age > RETRY_S and now - self._tried.get(source, -math.inf) > RETRY_S:
                self._tried[source] = now
                found = True
        return found
