"""What the ranks are told to store: jobs, the blocks they read, and slots reserved for them. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.wire import Code
from tokenlake_client.engines.vllm.entry import Entry
from tokenlake_client.engines.vllm.lookup import LookupPool, Reserved
from tokenlake_client.engines.vllm.plan import SavePlan
from tokenlake_client.engines.vllm.settings import EngineSettings

__all__ = ["Storing"]


class Storing:
    """Jobs that are out. For the scheduler's thread."""

    def __init__(self, settings: EngineSettings, block_tokens: int, *, shared: bool) -> None:
        """`shared`: several ranks fill one segment, so its slot is reserved here; else the rank reserves it behind the
        step."""
        self._settings = settings
        self._per_segment = settings.segment_tokens // block_tokens
        self._shared = shared
        self._last = 0
        self._blocks: dict[int, frozenset[int]] = {}
        self._reservations: dict[int, Reserved] = {}
        """By job."""

    def plan(
        self, pool: LookupPool, entry: Entry, segments: range, table: Callable[[str], Sequence[int]]
    ) -> list[SavePlan]:
        """A job that stores `segments` of a request, or none where nothing was granted. Raises what the pool and
        `table`, the blocks of a request, raise."""
        name = entry.request.request_id
        keys = entry.keys(pool, self._settings.salt)[segments.start : segments.stop]
        reserved = None
        if self._shared:
            deadline_s = self._settings.match_ms / 1e3
            reserved = pool.reserve(keys, segments.start, deadline_s=deadline_s, request=name, hints=entry.hints)
            refused = next((at for at, code in enumerate(reserved.codes) if Code(code).refused), len(keys))
            # What was refused is asked for again with the request's next segment.
            entry.progress.saved = segments.start + refused
            keys = keys[:refused]
            if not reserved.id:
                return []
        first = segments.start * self._per_segment
        blocks = tuple(table(name)[first : first + len(keys) * self._per_segment])
        self._last += 1
        self._blocks[self._last] = frozenset(blocks)
        if reserved is None:
            claimed = entry.gap is not None
            return [SavePlan(self._last, name, segments.start, tuple(keys), blocks, hints=entry.hints, claimed=claimed)]
        self._reservations[self._last] = reserved
        write = int(reserved.id), reserved.incarnation
        return [SavePlan(self._last, name, segments.start, tuple(keys), blocks, *write)]

    @property
    def jobs(self) -> tuple[int, ...]:
        """All that are out."""
        return tuple(self._blocks)

    def reading(self, blocks: set[int]) -> tuple[int, ...]:
        """Jobs that read any of these blocks."""
        return tuple(job for job, read in self._blocks.items() if not read.isdisjoint(blocks))

    def done(self, job: int) -> None:
        """Every rank has let go of the blocks of all jobs up to this one: it has filled its part, or given it back."""
        for number in [number for number in self._blocks if number <= job]:
            del self._blocks[number]
        for number in [number for number in self._reservations if number <= job]:
            self._reservations.pop(number).release()

    def close(self) -> None:
        """Give back what is reserved."""
        for reserved in self._reservations.values():
            reserved.release()
        self._reservations.clear()
