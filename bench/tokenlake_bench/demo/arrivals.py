"""Requests of the demo that arrive at a fixed rate: a router sends each to an engine, where it waits for its turn."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tokenlake_bench.baselines import Prompt
from tokenlake_bench.demo.engine import Engine, Ran
from tokenlake_bench.engine_model import GPUS, MODELS, EngineModel
from tokenlake_bench.routing.base import SGLANG, Fleet, RoutedRequest, Router
from tokenlake_bench.routing.knowledge import OwnRecord
from tokenlake_bench.routing.outcome import Answered
from tokenlake_bench.routing.systems import TREE_TOKENS, CacheAware, RoundRobin

BALANCE = 4
"""Requests by which the queues of two engines may differ before the cache-aware router prefers the shorter one.
SGLang's default is 32, for engines that serve many requests at once; those of the demo serve one at a time."""


class ShortestQueue:
    """Sends a request to the engine with the fewest requests that are not answered; of equal ones to the one that has
    served the longest part of its prefix, whose node has it."""

    def __init__(self, engines: int, segment_tokens: int) -> None:
        self._pending = [0] * engines
        self._sent = OwnRecord(engines, TREE_TOKENS // segment_tokens)

    def choose(self, request: RoutedRequest, now: float) -> int:
        depths = self._sent.depths(request.chain)
        engine = min(range(len(depths)), key=lambda each: (self._pending[each], -depths[each]))
        self._pending[engine] += 1
        self._sent.sent(request.chain, engine)
        return engine

    def finished(self, instance: int, answered: Answered) -> None:
        self._pending[instance] -= 1


def private_routers(engines: int, segment_tokens: int) -> dict[str, Router]:
    """The routers of engines with a cache each, by name: one in turn, and SGLang's cache-aware rule."""
    remembered = OwnRecord(engines, TREE_TOKENS // segment_tokens)
    # Neither rule reads the capacity or the model of the engines.
    model = EngineModel.fitting(MODELS["llama-3-8b"], GPUS["a100-80g"])
    settings = replace(SGLANG, balance_abs_threshold=BALANCE)
    fleet = Fleet(engines, 0, segment_tokens, model, remembered, random.Random(0), settings)
    return {"in turn": RoundRobin(fleet), "cache-aware": CacheAware(fleet)}


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request. `engine`: its number; `ttft_s`: seconds from its arrival to its first token, with the time
    for which it waited."""

    number: int
    engine: int
    ttft_s: float
    ran: Ran


class Arrivals:
    """The engines and what they are asked. `prompts`: each prompt as routers see it; `tokens`: its tokens."""

    def __init__(
        self,
        engines: Sequence[Engine],
        prompts: Sequence[Prompt],
        tokens: Callable[[int], list[int]],
        new_tokens: int,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._tokens = tokens
        self._new_tokens = new_tokens

    def serve(
        self,
        numbers: Iterable[int],
        router: Router,
        interval_s: float,
        arrived: Callable[[int], None],
        answered: Callable[[Served], None],
    ) -> None:
        """Let the requests `numbers` arrive in order, one per `interval_s`, and return when all are answered. Calls
        `arrived` before each request is routed, and `answered` for each answer, one call at a time."""
        lock = threading.Lock()
        queues = [queue.SimpleQueue[tuple[int, float] | None]() for _ in self._engines]
        began = time.monotonic()

        def work(engine: int) -> None:
            while (waiting := queues[engine].get()) is not None:
                number, arrival = waiting
                started = time.monotonic()
                ran = self._engines[engine].run(self._tokens(number), self._new_tokens)
                first = started + ran.ttft_ms / 1e3
                prompt = self._prompts[number].tokens
                told = Answered(
                    arrival - began,
                    prompt,
                    self._new_tokens,
                    ran.hit_tokens,
                    0,
                    first - began,
                    time.monotonic() - began,
                )
                with lock:
                    router.finished(engine, told)
                    answered(Served(number, engine, first - arrival, ran))

        with ThreadPoolExecutor(len(self._engines)) as threads:
            working = [threads.submit(work, engine) for engine in range(len(self._engines))]
            try:
                for place, number in enumerate(numbers):
                    arrival = began + place * interval_s
                    time.sleep(max(0.0, arrival - time.monotonic()))
                    arrived(number)
                    prompt = self._prompts[number]
                    with lock:
                        asked = RoutedRequest(number, prompt.tokens, prompt.chain)
                        engine = router.choose(asked, time.monotonic() - began)
                    queues[engine].put((number, arrival))
            finally:
                for each in queues:
                    each.put(None)
            for worked in working:
                worked.result()
