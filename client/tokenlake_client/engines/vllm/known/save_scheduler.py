"""The jobs in which the ranks store segments (saves), the blocks that the jobs read, and the slots reserved for them.
Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.known.disaggregated import UNREAD
from tokenlake_client.engines.vllm.known.request import RequestState
from tokenlake_client.engines.vllm.known.step_plan import SavePlan
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.pool import Pool
from tokenlake_client.write import Reservation


class ScheduledSaves:
    """The jobs in which ranks store segments and that the ranks have not finished. For the scheduler's thread."""

    def __init__(self, settings: EngineSettings, block_tokens: int, *, shared: bool, model: str = "") -> None:
        """`model`: the name under which vLLM serves it. `shared`: several ranks fill one segment, so this object
        reserves its slot for all of them. Otherwise the one rank reserves the slot itself, in the background."""
        self._settings = settings
        self._block = block_tokens
        self._blocks_per_segment = settings.segment_tokens // block_tokens
        self._shared = shared
        self._model = model
        self._last_job = 0
        self._blocks: dict[int, frozenset[int]] = {}
        """By the number of a save job, the blocks that the job reads, until all ranks have finished it."""
        self._first: dict[int, tuple[str, int]] = {}
        """By the number of such a job, its request and the index of its first segment."""
        self._reservations: dict[int, Reservation] = {}
        """By the number of a save job, the reservation of the slots that it fills."""

    def plan(
        self, pool: Pool, state: RequestState, segments: range, table: Callable[[str], Sequence[int]]
    ) -> list[SavePlan]:
        """Plan the job that stores `segments` of a request: a list of one plan, or an empty list if no slot was
        granted. `table` returns the blocks of a request, by its name. Raises the errors of the pool and of `table`."""
        name = state.request.request_id
        keys = state.keys(pool, self._settings.salt)[segments.start : segments.stop]
        first = segments.start * self._blocks_per_segment
        blocks = table(name)[first : first + len(keys) * self._blocks_per_segment]
        contents = state.contents(pool, segments, self._model)
        job = SavePlan(0, name, segments.start, tuple(keys), tuple(blocks), contents=contents)
        save, granted = self._complete(pool, state, job, state.hints)
        # The segments from the first one that the pool refused on are offered again in the request's next step.
        state.saved = segments.start + granted
        return save

    def plan_tail(
        self, pool: Pool, state: RequestState, key: SegmentKey, table: Callable[[str], Sequence[int]]
    ) -> tuple[list[SavePlan], bool]:
        """Plan the job that stores the tail of a request's prompt, which has this key. Returns and raises as `plan`,
        and also returns False if the pool has refused the tail."""
        name = state.request.request_id
        index, tokens = divmod(state.prompt, self._settings.segment_tokens)
        first = index * self._blocks_per_segment
        blocks = table(name)[first : first - (-tokens // self._block)]
        save, granted = self._complete(
            pool, state, SavePlan(0, name, index, (key,), tuple(blocks), tail=tokens), UNREAD
        )
        return save, granted > 0

    def _complete(
        self, pool: Pool, state: RequestState, save: SavePlan, hints: Hints | None
    ) -> tuple[list[SavePlan], int]:
        """Complete the plan `save` of a job, whose keys and blocks are known. Returns a list of it, or an empty list if
        no slot was granted; and the number of its segments, from the first on, that the pool did not refuse."""
        granted = len(save.keys)
        if self._shared:
            deadline_s = self._settings.match_ms / 1e3
            keys = [SegmentKey(key) for key in save.keys]
            reservation = pool.engine.reserve(
                keys, save.first, deadline_s=deadline_s, request=save.request, hints=hints, contents=save.contents
            )
            granted = next((at for at, code in enumerate(reservation.codes) if Code(code).refused), len(keys))
            if not reservation.id:
                return [], granted
            per_segment = len(save.blocks) // len(keys)
            self._reservations[self._last_job + 1] = reservation
            save = replace(
                save,
                keys=save.keys[:granted],
                blocks=save.blocks[: granted * per_segment],
                write=int(reservation.id),
                incarnation=reservation.incarnation,
                contents=(),
            )
        else:
            save = replace(save, hints=hints, marked=state.gap is not None or state.split.decodes_elsewhere)
        self._last_job += 1
        self._blocks[self._last_job] = frozenset(save.blocks)
        self._first[self._last_job] = save.request, save.first
        state.last_job = self._last_job
        return [replace(save, job=self._last_job, adapter=state.adapter_use)], granted

    @property
    def jobs(self) -> tuple[int, ...]:
        """The numbers of the jobs that the ranks have not finished."""
        return tuple(self._blocks)

    def first_unfinished(self, request: str) -> int:
        """The index of the first segment that the ranks may not have stored yet, of a request with such segments."""
        return min(first for name, first in self._first.values() if name == request)

    def reading(self, blocks: set[int]) -> tuple[int, ...]:
        """The numbers of the save jobs that may still read any of these blocks."""
        return tuple(job for job, read in self._blocks.items() if not read.isdisjoint(blocks))

    def done(self, job: int) -> None:
        """Record that all ranks have finished the jobs up to `job`: each has filled its part or given it up, and reads
        the blocks no more."""
        for number in [number for number in self._blocks if number <= job]:
            del self._blocks[number], self._first[number]
        for number in [number for number in self._reservations if number <= job]:
            self._reservations.pop(number).release()

    def close(self) -> None:
        """Release all reservations."""
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()
