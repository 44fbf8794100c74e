"""A scheduler's side of the connector with a fake pool and a clock that the test sets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tests.connector.fakes import FakePool, FakeRequest
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.disaggregated import Offer
from tokenlake_client.engines.vllm.known.request import RequestEnd, ScheduledPart
from tokenlake_client.engines.vllm.known.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.known.step_plan import StepPlan, StepReport
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.engines.vllm.settings import EngineSettings

SEGMENT, BLOCK = 8, 4
SEGMENT_BYTES = 1 << 20
MODEL = "served-name"
TOKEN_S = 1e-3
"""The prefill time per token."""
CHEAP = LoadTime(0.1e-3, 0.1e-3)
DEAR = LoadTime(1.0, 0.1e-3)
ENDED, ABORTED = RequestEnd(complete=True), RequestEnd(complete=False)
ENOUGH = 8
"""The number of samples after which a time is known."""


class Bench:
    """A scheduler's side, its pool and its clock."""

    def __init__(self, *, shared: bool = False, weigh_loads: bool = True, save: bool = True) -> None:
        self.pool = FakePool(segment_tokens=SEGMENT)
        self.there = True
        """Does the connection hand out the pool?"""
        self.now = 0.0
        self.counters = EngineCounters()
        self.reported: list[str] = []
        self.refused: list[str] = []
        settings = EngineSettings(segment_tokens=SEGMENT, weigh_loads=weigh_loads, save=save)
        self.side = SchedulerSide(
            self._usable,
            settings,
            BLOCK,
            self.counters,
            lambda what, error: self.reported.append(what),
            segment_bytes=SEGMENT_BYTES,
            shared=shared,
            model=MODEL,
            clock=lambda: self.now,
            refuse=self.refused.append,
        )

    def _usable(self) -> Any:
        return self.pool if self.there else None

    def know(self, tokens: list[int]) -> None:
        """Add the segments of `tokens` to the pool."""
        self.pool.known |= set(self.pool.prefix(tokens).keys)

    def place(self, request: FakeRequest, local: int = 0, **said: Any) -> int:
        """Give a request its blocks, numbered from 100. Returns the number of tokens to load. `said`: arguments of
        `SchedulerSide.new_request`."""
        external = self.ask(request, local, **said)
        assert external is not None
        self.side.allocated(request, blocks_of(request), external)
        return external

    def ask(self, request: FakeRequest, local: int = 0, **said: Any) -> int | None:
        """A request arrives, and vLLM asks for its tokens. `said`: arguments of `SchedulerSide.new_request`."""
        self.side.new_request(request, **said)
        return self.side.matched(request, local)

    def idle(self) -> StepPlan:
        """A step that computes nothing."""
        return self.side.step([], lambda name: [])

    def report(self, done: int = 0, received: Sequence[str] = (), invalid: Collection[int] = (), **fields: Any) -> None:
        """The ranks report the outcome of a step."""
        self.side.worker_output(StepReport(done, **fields), received, set(invalid))

    def end(self, request: FakeRequest, end: RequestEnd = ENDED) -> tuple[bool, Offer | None]:
        """A request finishes, with its blocks."""
        return self.side.finished(request, blocks_of(request), end)

    def step(self, request: FakeRequest, computed: int, new: int) -> StepPlan:
        part = ScheduledPart(request.request_id, computed, new, blocks_of(request), whole=True)
        plan = self.side.step([part], lambda name: blocks_of(request))
        request.num_computed_tokens = computed + new
        return plan


def blocks_of(request: FakeRequest) -> list[int]:
    return list(range(100, 100 + -(-request.num_tokens // BLOCK) + 1))


def request(tokens: int, name: str = "r", first: int = 0) -> FakeRequest:
    return FakeRequest(name, list(range(first, first + tokens)))


def prefill(bench: Bench, count: int = ENOUGH) -> None:
    """Run `count` steps with one prompt each; the rank reports their times."""
    for number in range(count):
        one = request(20 + 8 * number, f"prefill {number}", 10_000 + 100 * number)
        bench.place(one)
        plan = bench.step(one, 0, one.num_tokens)
        bench.report(computed={plan.step: one.num_tokens * TOKEN_S})
        bench.end(one, ABORTED)


def load(bench: Bench, took: LoadTime, node: str = "here", count: int = ENOUGH) -> None:
    """Run `count` loads of a segment from `node`, which take `took`."""
    for number in range(count):
        one = request(SEGMENT + 1, f"load {node} {number}", 20_000 + 100 * number)
        know(bench, one, [node])
        assert bench.place(one) == SEGMENT, "every hit is loaded until enough loads are measured"
        bench.idle()
        bench.report(0, [one.request_id], loaded={one.request_id: took})
        bench.end(one, ABORTED)


def know(bench: Bench, one: FakeRequest, nodes: list[str]) -> None:
    """Add the first segments of `one` to the pool, on these nodes."""
    keys = bench.pool.prefix(one.all_token_ids).keys[: len(nodes)]
    bench.pool.known |= set(keys)
    bench.pool.places |= dict(zip(keys, nodes, strict=True))
