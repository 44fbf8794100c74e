"""The load of a restart run: one engine for each node, which reads the prompts of one workload in turns and stores the
segments that it does not find."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_bench.sizing import bench_layout
from tokenlake_bench.workload import BuiltinSettings, builtin_workload
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

SEGMENT_TOKENS: Final = 32
LAYOUT: Final = bench_layout(SEGMENT_TOKENS)
CONVERSATIONS: Final = 16
"""Conversations that are open at a time, per node: the memory of a node (`command.MEMORY`) does not hold all of their
segments."""
RATE: Final = 8.0
"""Requests per second of each engine, at most."""
REQUESTS: Final = 20_000
"""Requests of the workload, after which it begins anew."""
RECENT: Final = 50
"""Requests are repeated of so many last ones."""
TENANT: Final = "default"
RETRY_S: Final = 0.02
WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: its end in seconds since the start of the run, its segments, those read from the pool, and those
    that a cache which forgets nothing would have had."""

    at_s: float
    asked: int
    hits: int
    ideal: int
    repeated: bool
    """True for a request of a prompt that an earlier request had: those of the time in which nothing is stored."""


@dataclass
class Load:
    """The engines at the nodes of a running cluster. A context manager: starts them, and ends them at the exit."""

    cluster: Cluster
    seed: int
    began: float = field(default_factory=time.monotonic)
    """`time.monotonic()` at the start of the run."""
    answered: list[Answered] = field(default_factory=list)
    """In the order of the answers."""
    digests: dict[SegmentKey, bytes] = field(default_factory=dict)
    """The digest (`payload`) of each segment that was asked for."""
    wrong_bytes: int = 0
    """Of all reads since the start of the run, those between restarts included."""
    failures: int = 0
    """Calls without an answer in time, and requests that ended because the daemon of their node did."""
    storing: bool = True
    """False: engines repeat requests and store nothing, so that a segment that the cluster has lost stays lost, and the
    conversations go on afterwards where they were."""

    def __post_init__(self) -> None:
        settings = BuiltinSettings(
            requests=REQUESTS,
            seed=self.seed,
            prompt_tokens=(600, 2_000),
            concurrent=CONVERSATIONS * len(self.cluster.nodes),
        )
        self._workload = builtin_workload(settings)
        self._identity = PayloadIdentity(self.seed, TENANT, LAYOUT.fingerprint())
        self._taken = 0
        self._fresh: list[Answered] = []
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(node,), daemon=True) for node in self.cluster.nodes]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    @property
    def at_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.began

    def next(self, count: int) -> Sequence[Answered]:
        """Wait for the next `count` answers to requests that repeat no earlier ones. Raises `Unreachable` where they
        do not come."""
        with self._changed:
            first = len(self._fresh)
            if not self._changed.wait_for(lambda: len(self._fresh) >= first + count, WAIT_S + count / RATE):
                raise Unreachable("the engines get no answers")
            return self._fresh[first : first + count]

    def _run(self, node: Node) -> None:
        draw = random.Random(f"{self.seed} {node.name}")
        while not self._stopping.is_set():
            with suppress(TokenLakeError):
                pool = Pool.connect(node.socket, LAYOUT, deadlines=self.cluster.deadlines)
                try:
                    self._serve(LiveClient(pool, self.seed), draw)
                except TokenLakeError:
                    with self._changed:
                        self.failures += 1
                    raise
                finally:
                    pool.close()
            self._stopping.wait(RETRY_S)

    def _serve(self, client: LiveClient, draw: random.Random) -> None:
        while not self._stopping.wait(draw.uniform(0.5, 1.5) / RATE):
            storing = self.storing
            tokens = self._workload[self._take(draw, storing=storing)].tokens
            keys = client.pool.prefix(tokens).keys
            with self._changed:
                known = [key in self.digests for key in keys]
                self.digests.update(zip(keys, self._identity.digests(tokens, SEGMENT_TOKENS), strict=True))
            served = client.serve(tokens, store=storing)
            ideal = known.index(False) if False in known else len(known)
            answered = Answered(self.at_s, len(keys), served.hits, ideal, repeated=not storing)
            with self._changed:
                self.answered.append(answered)
                if storing:
                    self._fresh.append(answered)
                self.wrong_bytes += served.wrong_bytes
                self.failures += served.failures
                self._changed.notify_all()

    def _take(self, draw: random.Random, *, storing: bool) -> int:
        """The number of the next request, or of a late one."""
        with self._changed:
            if not storing:
                return max(0, self._taken - draw.randint(1, RECENT))
            number, self._taken = self._taken, (self._taken + 1) % REQUESTS
            return number
