"""The connector's scheduler side with a pool, a clock and requests that a test made up."""

from __future__ import annotations

from tests.connector.fakes import FakePool, FakeRequest
from tokenlake_client.engines.vllm.counters import Counters
from tokenlake_client.engines.vllm.entry import Scheduled
from tokenlake_client.engines.vllm.plan import StepPlan
from tokenlake_client.engines.vllm.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.settings import EngineSettings

SEGMENT, BLOCK = 8, 4
SEGMENT_BYTES = 1 << 20


class Bench:
    """One scheduler's side, its pool, and a clock that a test turns."""

    def __init__(
        self, load: str = "async", *, shared: bool = False, weigh_loads: bool = True, save: bool = True
    ) -> None:
        self.pool = FakePool(segment_tokens=SEGMENT)
        self.there = True
        self.now = 0.0
        self.counters = Counters()
        self.reported: list[str] = []
        settings = EngineSettings(
            segment_tokens=SEGMENT,
            load=load,  # type: ignore[arg-type]
            weigh_loads=weigh_loads,
            save=save,
        )
        self.side = SchedulerSide(
            lambda: self.pool if self.there else None,
            settings,
            BLOCK,
            self.counters,
            lambda what, error: self.reported.append(what),
            segment_bytes=SEGMENT_BYTES,
            shared=shared,
            clock=lambda: self.now,
        )

    def know(self, tokens: list[int]) -> None:
        """The pool has these."""
        self.pool.known |= set(self.pool.prefix(tokens).keys)

    def place(self, request: FakeRequest, local: int = 0) -> int:
        """Give a request its blocks, numbered from 100; the tokens to load."""
        self.side.new_request(request)
        external = self.side.matched(request, local)
        assert external is not None
        self.side.allocated(request, blocks_of(request), external)
        return external

    def step(self, request: FakeRequest, computed: int, new: int) -> StepPlan:
        part = Scheduled(request.request_id, computed, new, blocks_of(request), whole=True)
        plan = self.side.step([part], lambda name: blocks_of(request))
        request.num_computed_tokens = computed + new
        return plan


def blocks_of(request: FakeRequest) -> list[int]:
    return list(range(100, 100 + -(-request.num_tokens // BLOCK) + 1))


def request(tokens: int, name: str = "r", first: int = 0) -> FakeRequest:
    return FakeRequest(name, list(range(first, first + tokens)))
