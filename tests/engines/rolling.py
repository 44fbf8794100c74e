"""Nodes with kept memory restart one after the other, while their engines serve conversations with shared prefixes.

The conversations are common to all engines: each turn is served by the engine that is free, so that engines read what
others computed. Each answer is compared with that of an engine without the pool.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.robustness.live import wait_until
from tokenlake_testing import fork_server
from tokenlake_testing.cluster import Cluster, Node

KEPT = {"keep_s": "600", "match_deadline_ms": "2000", "suspect_ms": "20000"}
"""Settings of the daemons; with these deadlines a busy machine causes no miss."""
MATCH_S = 2.0
"""The deadline of a match at the engines."""
NEWER = "tests.robustness.newer_daemon"
SIGNALS = ("SIGTERM", "SIGKILL")
OPEN = 8
"""Conversations that are open at a time."""
TURNS = 5
SYSTEM_PROMPTS = 3
LEAST = 24
"""Requests from which the shares before and after a restart are taken."""
PAUSE_S = 0.05
"""Between two requests of an engine."""
LIMIT_S = 90.0

Tokens = list[int]


@dataclass(frozen=True)
class Reply:
    """One answer of an engine. `supplied`: the prompt tokens that the pool supplied; `seconds`: of the request alone,
    without the wait for its segments to be stored."""

    tokens: Tokens
    supplied: int
    seconds: float


@dataclass(frozen=True)
class Serving:
    """An engine under test, that of the node with the same index. `pid`: its process."""

    ask: Callable[[Tokens], Reply]
    """Returns when the segments of prompt and answer are stored, or are given up."""
    pid: int


@dataclass(frozen=True)
class Shape:
    """The lengths of the conversations in tokens."""

    segment: int
    system: int
    turn: int
    prompt: Callable[[int, int], Tokens]
    """Seeded tokens: length, seed."""


@dataclass(frozen=True)
class Request:
    """A request that was answered. `ideal`: the tokens that a cache supplies which forgets nothing."""

    engine: int
    asked: int
    ideal: int
    supplied: int
    seconds: float
    wrong: bool


@dataclass
class Load:
    """The requests of all engines, each with a thread of its own."""

    engines: Sequence[Serving]
    expected: Callable[[Tokens], Tokens]
    """The answer of an engine without the pool; called by one thread at a time."""
    shape: Shape
    answers: list[Request] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._reference = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._seeds = 0
        self._known: set[int] = set()
        self._open = deque([self._begun() for _ in range(OPEN)])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, the engines serve."""
        threads = [threading.Thread(target=self._serve, args=(number,)) for number in range(len(self.engines))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def next(self, count: int) -> list[Request]:
        """The next `count` requests or more, at least one of each engine."""
        first = len(self.answers)

        def enough() -> bool:
            found = self.answers[first:]
            return len(found) >= count and len({each.engine for each in found}) == len(self.engines)

        self.until(enough, f"{count} requests are answered")
        return self.answers[first:]

    def settled(self) -> list[Request]:
        """Wait until requests of all engines, `LEAST` one after the other, are supplied with all that a cache has which
        forgets nothing; these requests."""
        first = len(self.answers)

        def last() -> list[Request]:
            return self.answers[max(first, len(self.answers) - LEAST) :]

        def all_hits() -> bool:
            found = last()
            every = len({each.engine for each in found}) == len(self.engines) and len(found) == LEAST
            return every and all(each.supplied == each.ideal for each in found)

        self.until(all_hits, "the pool supplies all that was computed")
        return last()

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached()`, or until an engine has failed."""
        wait_until(lambda: bool(self.failures) or reached(), what, LIMIT_S)
        assert not self.failures, self.failures

    def _serve(self, number: int) -> None:
        while not self._ended.wait(PAUSE_S):
            try:
                self._turn(number)
            except BaseException as error:
                self.failures.append(error)
                return

    def _turn(self, number: int) -> None:
        with self._lock:
            seed, turn, tokens = self._open.popleft()
            ends = range(self.shape.segment, len(tokens), self.shape.segment)
            known = [hash(tuple(tokens[:end])) in self._known for end in ends]
        with self._reference:
            expected = self.expected(tokens)
        reply = self.engines[number].ask(tokens)
        # The cache of the last token is not computed.
        whole = [*tokens, *expected[:-1]]
        ends = range(self.shape.segment, len(whole) + 1, self.shape.segment)
        ideal = self.shape.segment * (known.index(False) if False in known else len(known))
        with self._lock:
            self._known.update(hash(tuple(whole[:end])) for end in ends)
            more = self.shape.prompt(self.shape.turn, 10_000 + TURNS * seed + turn)
            following = (seed, turn + 1, [*tokens, *expected, *more])
            self._open.append(following if turn + 1 < TURNS else self._begun())
            wrong = reply.tokens != expected
            self.answers.append(Request(number, len(tokens), ideal, reply.supplied, reply.seconds, wrong))

    def _begun(self) -> tuple[int, int, Tokens]:
        """The first turn of a new conversation: number, turn, tokens."""
        self._seeds += 1
        system = self.shape.prompt(self.shape.system, self._seeds % SYSTEM_PROMPTS)
        own = self.shape.prompt(self.shape.turn, 1_000_000 + self._seeds)
        return self._seeds, 0, [*system, *own]


@dataclass(frozen=True)
class Restart:
    """A restart of the daemon of node `number`: the requests before it, between the signal and the first one of its
    engine that the pool supplied again, and after that. Seconds from the signal: `ready_s` until the daemon served and
    was connected with the others, `back_s` until that first request."""

    signal: str
    number: int
    before: list[Request]
    during: list[Request]
    after: list[Request]
    ready_s: float
    back_s: float

    def row(self) -> str:
        """A row of a table: for the node's own engine and then for the others, tokens supplied / prompt tokens before,
        during and after, in brackets those of a cache that forgets nothing; and the requests that took longer than the
        longest one before by a match deadline."""
        cells = [f"{self.signal} node{self.number}"]
        for own in (True, False):
            for requests in (self.before, self.during, self.after):
                cells.append(share([each for each in requests if (each.engine == self.number) == own]))
        usual = max(each.seconds for each in self.before)
        late = sum(each.seconds > usual + MATCH_S for each in [*self.during, *self.after])
        median = statistics.median(each.seconds for each in self.before)
        longest = max(each.seconds for each in self.during)
        cells += [
            f"{self.ready_s:.1f}, {self.back_s:.1f} s",
            f"{median:.2f}, {usual:.2f} s",
            f"{longest:.2f} s",
            str(late),
        ]
        return f"| {' | '.join(cells)} |"


def share(requests: Sequence[Request]) -> str:
    """Hits of these requests, in brackets those of a cache that forgets nothing; and the number of requests."""
    asked = sum(each.asked for each in requests) or 1
    supplied, ideal = (sum(getattr(each, name) for each in requests) for name in ("supplied", "ideal"))
    return f"{supplied / asked:.1%} ({ideal / asked:.1%}) of {len(requests)}"


def rolling_restarts(cluster: Cluster, load: Load) -> list[Restart]:
    """Restart the daemon of each node in turn by SIGTERM, to a version that adds a field to each message, and then
    again by SIGKILL, while the engines serve. Checks that no request fails or has a wrong token, that hits after each
    restart are those of before, and that engines map the memory where they did before. Prints a table."""
    restarts: list[Restart] = []
    with load.running():
        for signal in SIGNALS:
            for number, node in enumerate(cluster.nodes):
                before = load.settled()
                mapped = mappings(load.engines[number].pid)
                first, began = len(load.answers), time.monotonic()
                _end(node, signal)
                with fork_server.executed():
                    node.start(NEWER)
                cluster.wait_ready()
                started, ready_s = len(load.answers), time.monotonic() - began

                def back(number: int = number, started: int = started) -> bool:
                    return any(each.engine == number and each.supplied for each in load.answers[started:])

                load.until(back, "the pool supplies the engine of the node again")
                back_s, during = time.monotonic() - began, load.answers[first:]
                restarts.append(Restart(signal, number, before, during, load.next(LEAST), ready_s, back_s))
                now = mappings(load.engines[number].pid)
                assert mapped.items() & now.items()
                assert all(mapped[region] == now[region] for region in mapped.keys() & now.keys())
        load.settled()
    for restart in restarts:
        print(restart.row())
    assert not any(each.wrong for each in load.answers)
    return restarts


def _end(node: Node, signal: str) -> None:
    if signal == "SIGKILL":
        node.kill()
    else:
        assert node.stop() == 0


def mappings(pid: int) -> dict[tuple[str, str], str]:
    """Where a process maps regions of a pool: the addresses, by inode and rights of the region."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {(words[4], words[1]): words[0] for words in lines if len(words) > 5 and _is_region(words[5])}


def _is_region(name: str) -> bool:
    return name.startswith("/memfd:tokenlake-") and name.removeprefix("/memfd:tokenlake-").isdigit()
