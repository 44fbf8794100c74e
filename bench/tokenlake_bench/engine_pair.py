"""Two engines behind a round-robin router, in `tokenlake bench engine`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any, Final

from tokenlake_bench.engine_workload import Conversations
from tokenlake_testing.engine_lines import Engine

ANSWER_TOKENS: Final = 16


class EnginePair:
    """Two engines of one arrangement, which serve the requests of conversations alternately."""

    def __init__(self, name: str, engines: Sequence[Engine], workload: Conversations) -> None:
        self._name = name
        self._engines = engines
        self._before = self._hook_seconds()
        self._histories: list[list[int]] = [[] for _ in range(workload.conversations)]
        self._first: list[float] = []
        self._later: list[float] = []
        self._whole: list[float] = []
        self._prompt_tokens = 0
        self.answers: list[list[int]] = []
        """The tokens of all answers so far."""

    def serve(self, turn: int, number: int, question: list[int]) -> None:
        """Serve the next request of a conversation."""
        history = self._histories[number]
        history += question
        # The router shifts by one engine with each request of the conversation, so that its requests alternate between
        # the two engines.
        engine = self._engines[(len(self.answers) + turn % 2) % len(self._engines)]
        self._first.append(engine.timed([history], 1).seconds)
        if turn > 0:
            self._later.append(self._first[-1])
        run = engine.timed([history], ANSWER_TOKENS)
        self._whole.append(run.seconds)
        self._prompt_tokens += len(history)
        history += run.tokens[0]
        self.answers.append(run.tokens[0])

    def row(self) -> dict[str, Any]:
        """The row of the JSON, for the requests served so far. The warm requests are all but the first of each
        conversation."""
        served = len(self.answers)
        return {
            "part": "two instances, round robin",
            "arrangement": self._name,
            "prompt_tokens": self._prompt_tokens,
            "ttft_ms": 1e3 * mean(self._first),
            "ttft_warm_ms": 1e3 * mean(self._later),
            "answers_per_second": served / (sum(self._first) + sum(self._whole)),
            "connector_ms": 1e3 * (self._hook_seconds() - self._before) / (2 * served),
        }

    def _hook_seconds(self) -> float:
        """Seconds in the hooks of TokenLake's connector; 0 in other arrangements."""
        counts: list[dict[str, float]] = [engine.call("counts") for engine in self._engines]
        return sum(count.get("hook_seconds", 0.0) for count in counts)
