"""The jobs in which the ranks store segments (saves), the blocks that the jobs read, and the slots reserved for them.
Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenlake.wire import Code
from tokenlake_client.engines.vllm.pool import Reservation, SchedulerPool
from tokenlake_client.engines.vllm.request import RequestState
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.engines.vllm.step_plan import SavePlan

__all__ = ["ScheduledSaves"]


class ScheduledSaves:
    """The jobs in which ranks store segments and that the ranks have not finished. For the scheduler's thread."""

    def __init__(self, settings: EngineSettings, block_tokens: int, *, shared: bool, model: str = "") -> None:
        """`model`: the name under which vLLM serves it. `shared`: several ranks fill one segment, so this object
        reserves its slot for all of them. Otherwise the one rank reserves the slot itself, in the background."""
        self._settings = settings
        self._blocks_per_segment = settings.segment_tokens // block_tokens
        self._shared = shared
        self._model = model
        self._last_job = 0
        self._blocks: dict[int, frozenset[int]] = {}
        """By the number of a save job, the blocks that the job reads, until all ranks have finished it."""
        self._reservations: dict[int, Reservation] = {}
        """By the number of a save job, the reservation of the slots that it fills."""

    def plan(
        self, pool: SchedulerPool, state: RequestState, segments: range, table: Callable[[str], Sequence[int]]
    ) -> list[SavePlan]:
        """Plan the job that stores `segments` of a request: a list of one plan, or an empty list if no slot was
        granted. `table` returns the blocks of a request, by its name. Raises the errors of the pool and of `table`."""
        name = state.request.request_id
        keys = state.keys(pool, self._settings.salt)[segments.start : segments.stop]
        contents = state.contents(pool, segments, self._model)
        reservation = None
        if self._shared:
            reservation = pool.reserve(
                keys,
                segments.start,
                deadline_s=self._settings.match_ms / 1e3,
                request=name,
                hints=state.hints,
                contents=contents,
            )
            granted = next((at for at, code in enumerate(reservation.codes) if Code(code).refused), len(keys))
            # The segments from the first one that the pool refused on are offered again in the request's next step.
            state.saved.segments = segments.start + granted
            keys = keys[:granted]
            if not reservation.id:
                return []
        first = segments.start * self._blocks_per_segment
        blocks = tuple(table(name)[first : first + len(keys) * self._blocks_per_segment])
        use = state.adapter.use if state.adapter is not None else None
        self._last_job += 1
        self._blocks[self._last_job] = frozenset(blocks)
        if reservation is None:
            marked = state.gap is not None
            hints = state.hints
            return [
                SavePlan(
                    self._last_job,
                    name,
                    segments.start,
                    tuple(keys),
                    blocks,
                    hints=hints,
                    marked=marked,
                    adapter=use,
                    contents=contents,
                )
            ]
        self._reservations[self._last_job] = reservation
        write = int(reservation.id), reservation.incarnation
        return [SavePlan(self._last_job, name, segments.start, tuple(keys), blocks, *write, adapter=use)]

    @property
    def jobs(self) -> tuple[int, ...]:
        """The numbers of the jobs that the ranks have not finished."""
        return tuple(self._blocks)

    def reading(self, blocks: set[int]) -> tuple[int, ...]:
        """The numbers of the save jobs that may still read any of these blocks."""
        return tuple(job for job, read in self._blocks.items() if not read.isdisjoint(blocks))

    def done(self, job: int) -> None:
        """Record that all ranks have finished the jobs up to `job`: each has filled its part or given it up, and reads
        the blocks no more."""
        for number in [number for number in self._blocks if number <= job]:
            del self._blocks[number]
        for number in [number for number in self._reservations if number <= job]:
            self._reservations.pop(number).release()

    def close(self) -> None:
        """Release all reservations."""
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()
