"""The measurements of a scenario: times of calls, compared bytes, lost segments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.robustness.live import LIMIT_S, Prompt, outcomes, wait_until
from tokenlake.errors import DeadlinePassed, TokenLakeError, Unreachable
from tokenlake.hints import Hints
from tokenlake.wire import Code
from tokenlake_client import Pool

T = TypeVar("T")

MATCH_S = 1.0
"""The deadline of a match for other nodes: a busy machine would exceed the default of 20 ms without any fault."""


@dataclass
class Outcome:
    """The measurements of one scenario. Times are those of single calls of a `Pool`."""

    longest_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)
    """Per engine, the time of all calls that failed or found fewer segments than the pool had."""
    timeouts: dict[str, int] = field(default_factory=dict)
    """Per engine, calls that its daemon left unanswered for their whole deadline."""
    lost: int = 0
    """Segments that an engine found before the fault, and no engine afterwards."""
    may_lose: int = 0
    """Segments that only the faulty node held, or that the fault itself destroyed."""
    wrong: int = 0
    """Segments read whose bytes are not those that were stored."""
    compared: int = 0
    """Segments read."""


class Asker:
    """One engine. Calls that fail or find too little count as waits."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.pool = pool
        self.misses: type[TokenLakeError] = Unreachable
        """The errors that count as misses; any other error fails the scenario."""
        self.begin()

    def begin(self) -> None:
        """Measure from here on."""
        self.longest_s = 0.0
        self.waited_s = 0.0
        self.timeouts = 0
        self.failed = 0
        """Calls that raised."""
        self.missed = 0
        """Requests that found fewer segments than the pool had."""
        self.wrong = 0
        self.compared = 0

    def call(self, make: Callable[[], T]) -> T:
        """Make and time one call. Raises the errors of the call."""
        began = time.monotonic()
        try:
            return make()
        except TokenLakeError as error:
            self.failed += 1
            self.timeouts += isinstance(error, DeadlinePassed) and "did not answer" in str(error)
            self.waited_s += time.monotonic() - began
            raise
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def read(self, prompt: Prompt) -> int:
        """Match, fetch and compare a prompt. Returns the number of segments; 0 when a call failed."""
        began = time.monotonic()
        count = 0
        with suppress(self.misses):
            keys = self.pool.prefix(prompt.tokens).keys
            with self.call(lambda: self.pool.match(keys, deadline_s=MATCH_S)) as lease:
                arrays = self.call(lambda: lease.fetch())
                self.wrong += prompt.wrong(arrays)
                count = len(arrays)
                self.compared += count
                del arrays
            if count < prompt.segments:
                self.missed += 1
                self.waited_s += time.monotonic() - began
        return count

    def store(self, prompt: Prompt, patience: float = 0.0, hints: Hints | None = None) -> set[Code]:
        """Store all segments of a prompt. Returns the distinct codes; none when the call failed."""
        with suppress(self.misses):
            keys = self.pool.prefix(prompt.tokens).keys
            return outcomes(self.call(lambda: self.pool.store_all(keys, prompt.fill, patience=patience, hints=hints)))
        return set()

    def check(self, prompt: Prompt, arrays: list[NDArray[np.uint8]]) -> None:
        """Compare arrays that the scenario fetched itself."""
        self.wrong += prompt.wrong(arrays)
        self.compared += len(arrays)

    def readable(self, prompts: Sequence[Prompt]) -> set[bytes]:
        """Keys of the segments that the engine can fetch, each with a request of its own."""
        found = set()
        for prompt in prompts:
            for index, key in enumerate(self.pool.prefix(prompt.tokens).keys):
                with self.pool.match([key], deadline_s=MATCH_S) as lease:
                    arrays = lease.fetch()
                    self.wrong += prompt.wrong(arrays, index)
                    self.compared += len(arrays)
                    if arrays:
                        found.add(bytes(key))
                    del arrays
        return found

    def answered(self) -> bool:
        """Does the daemon answer the engine?"""
        with suppress(self.misses):
            self.pool.match([])
            return True
        return False

    def whole(self, prompts: Sequence[Prompt]) -> bool:
        """Does the engine read all segments of these prompts?"""
        return all(self.read(prompt) == prompt.segments for prompt in prompts)


@contextmanager
def asking(askers: Sequence[Asker], request: Callable[[Asker, int], object]) -> Iterator[Callable[[int], None]]:
    """Each engine makes `request(engine, number)` again and again in a thread of its own, until the block is left.
    Yields a function that waits for so many more requests of each engine.

    AssertionError when a call hangs, or raises an error that is no miss.
    """
    ended = threading.Event()
    made = [0] * len(askers)
    errors: list[BaseException] = []

    def go(at: int) -> None:
        try:
            while not ended.is_set():
                request(askers[at], made[at])
                made[at] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(at,), daemon=True) for at in range(len(askers))]

    def wait(requests: int) -> None:
        goals = [count + requests for count in made]
        wait_until(lambda: bool(errors) or all(a >= b for a, b in zip(made, goals, strict=True)), "requests end")

    for thread in threads:
        thread.start()
    try:
        yield wait
    finally:
        ended.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    assert not errors, errors
