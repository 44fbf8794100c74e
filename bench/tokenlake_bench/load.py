"""Engines without a model at running daemons, a thread each: the load of `bench churn` and `bench restart`.

An engine asks its `Source` for a request, reads what the pool has of it, compares every byte, and stores what is
missing. A call that fails is counted, and the engine connects again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.layout import Layout
from tokenlake_bench.live_client import LiveClient, Served
from tokenlake_client import Deadlines, Pool

RETRY_S: Final = 0.02
WAIT_S: Final = 120.0


class Asked(NamedTuple):
    """One request: its prompt, and whether the engine stores what it does not find. `fixed`: it repeats a prompt that
    was stored before. `number`: of the prompt. `ideal`: segments that a cache which forgets nothing would have."""

    tokens: NDArray[np.uint32]
    store: bool
    fixed: bool
    number: int
    ideal: int = 0


class Answer(NamedTuple):
    """One answered request: its end in seconds since the start of the load, and what was found."""

    at_s: float
    asked: Asked
    served: Served

    @property
    def segments(self) -> int:
        """Segments of the prompt."""
        return len(self.served.keys)


class Source(Protocol):
    """The requests of a load, for all of its engines. Called by their threads."""

    def draw(self, pool: Pool) -> Asked:
        """The next request of the engine that has this client."""
        ...


@dataclass
class Load:
    """The engines at the daemons with these local sockets, each with at most `rate` requests per second. A context
    manager: starts them, and ends them at the exit."""

    sockets: Sequence[Path]
    layout: Layout
    source: Source
    seed: int
    rate: float
    deadlines: Deadlines
    match_s: float | None = 1.0
    """Deadline of a match; None: the daemon's."""
    answers: list[Answer] = field(default_factory=list)
    """In the order in which they were given."""
    errors: list[str] = field(default_factory=list)
    failures: int = 0
    """Calls that the daemon did not answer in time, and requests that ended because the daemon did."""
    wrong_bytes: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(socket,), daemon=True) for socket in self.sockets]

    def __enter__(self) -> Load:
        self.began = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    @property
    def at_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def next(self, count: int) -> list[Answer]:
        """Wait for the next `count` answers to requests that repeat no prompt. Raises `Unreachable` where they do not
        come."""
        with self._changed:
            first = len(self.answers)

            def fresh() -> list[Answer]:
                return [each for each in self.answers[first:] if not each.asked.fixed]

            if not self._changed.wait_for(lambda: len(fresh()) >= count, WAIT_S + count / self.rate):
                raise Unreachable("the engines get no answers")
            return fresh()[:count]

    def serve(self, client: LiveClient, asked: Asked) -> None:
        """Serve one request."""
        served = client.serve(asked.tokens, store=asked.store)
        with self._changed:
            self.answers.append(Answer(self.at_s, asked, served))
            self.wrong_bytes += served.wrong_bytes
            self.failures += served.failures
            self._changed.notify_all()

    def connect(self, socket: Path) -> LiveClient:
        """A client of the daemon with this local socket; the caller closes it."""
        pool = Pool.connect(socket, self.layout, deadlines=self.deadlines)
        return LiveClient(pool, self.seed, match_s=self.match_s)

    def _run(self, socket: Path) -> None:
        draw = random.Random(f"{self.seed} {socket.stem}")
        while not self._stopping.is_set():
            with suppress(TokenLakeError):
                client = self.connect(socket)
                try:
                    while not self._stopping.wait(draw.uniform(0.5, 1.5) / self.rate):
                        self.serve(client, self.source.draw(client.pool))
                except TokenLakeError as error:
                    with self._changed:
                        self.failures += 1
                        self.errors.append(f"{socket.stem}: {type(error).__name__}: {error}")
                finally:
                    client.pool.close()
            self._stopping.wait(RETRY_S)


def hit_rate(answers: Sequence[Answer]) -> float:
    """Segments found / segments asked for."""
    return sum(each.served.hits for each in answers) / max(1, sum(each.segments for each in answers))


def ideal_rate(answers: Sequence[Answer]) -> float:
    """The hit rate of a cache that forgets nothing."""
    return sum(each.asked.ideal for each in answers) / max(1, sum(each.segments for each in answers))
