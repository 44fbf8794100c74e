"""The jobs in which the ranks store segments, the blocks that the jobs read, and the slots reserved for them. Imports
no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.wire import Code
from tokenlake_client.engines.vllm.pool import Reservation, SchedulerPool
from tokenlake_client.engines.vllm.request import RequestState
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.step_plan import SavePlan

__all__ = ["ScheduledSaves"]


class ScheduledSaves:
    """The jobs under way. For the scheduler's thread."""

    def __init__(self, settings: EngineSettings, block_tokens: int, *, shared: bool) -> None:
        """`shared`: several ranks fill one segment, so the scheduler's side reserves its slot. Otherwise the rank
        reserves the slot, behind the step."""
        self._settings = settings
        self._blocks_per_segment = settings.segment_tokens // block_tokens
        self._shared = shared
        self._last_job = 0
        self._blocks: dict[int, frozenset[int]] = {}
        """The blocks that each job under way reads."""
        self._reservations: dict[int, Reservation] = {}
        """The reservation of each job."""

    def plan(
        self, pool: SchedulerPool, state: RequestState, segments: range, table: Callable[[str], Sequence[int]]
    ) -> list[SavePlan]:
        """A job that stores `segments` of a request; no job if no slot was granted. `table` returns the blocks of a
        request. Raises the errors of the pool and of `table`."""
        name = state.request.request_id
        keys = state.keys(pool, self._settings.salt)[segments.start : segments.stop]
        reservation = None
        if self._shared:
            deadline_s = self._settings.match_ms / 1e3
            reservation = pool.reserve(keys, segments.start, deadline_s=deadline_s, request=name, hints=state.hints)
            granted = next((at for at, code in enumerate(reservation.codes) if Code(code).refused), len(keys))
            # The refused segments are offered again with the request's next segment.
            state.saved.segments = segments.start + granted
            keys = keys[:granted]
            if not reservation.id:
                return []
        first = segments.start * self._blocks_per_segment
        blocks = tuple(table(name)[first : first + len(keys) * self._blocks_per_segment])
        self._last_job += 1
        self._blocks[self._last_job] = frozenset(blocks)
        if reservation is None:
            marked = state.gap is not None
            return [
                SavePlan(self._last_job, name, segments.start, tuple(keys), blocks, hints=state.hints, marked=marked)
            ]
        self._reservations[self._last_job] = reservation
        write = int(reservation.id), reservation.incarnation
        return [SavePlan(self._last_job, name, segments.start, tuple(keys), blocks, *write)]

    @property
    def jobs(self) -> tuple[int, ...]:
        """All jobs under way."""
        return tuple(self._blocks)

    def reading(self, blocks: set[int]) -> tuple[int, ...]:
        """The jobs that read any of these blocks."""
        return tuple(job for job, read in self._blocks.items() if not read.isdisjoint(blocks))

    def done(self, job: int) -> None:
        """No rank reads the blocks of the jobs up to this one: each rank has filled its part or given it up."""
        for number in [number for number in self._blocks if number <= job]:
            del self._blocks[number]
        for number in [number for number in self._reservations if number <= job]:
            self._reservations.pop(number).release()

    def close(self) -> None:
        """Release all reservations."""
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()
