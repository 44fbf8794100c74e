"""The load of a churn run: one engine for each node, which reads prompts that other engines stored and stores new ones.

Half of the requests are of a fixed set of prompts, stored before the run: all of their segments are in the pool, so
whatever is not found is lost or cannot be found. The other half follow a popularity that moves on, as real ones do.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake_bench.payload import PayloadIdentity, check, fill
from tokenlake_client import Deadlines, Pool

SEGMENT_TOKENS: Final = 16
PROMPT_SEGMENTS: Final = 8
FIXED_PROMPTS: Final = 96
RECENT: Final = 40
"""A request of the moving half asks for one of so many prompts, of which the oldest is replaced by a new one at every
`RENEWED`th request."""
RENEWED: Final = 4
LAYOUT: Final = Layout(
    model_id="churn",
    weights_digest="00",
    dtype="float16",
    layers=2,
    kv_heads=4,
    key_dim=32,
    value_dim=32,
    position="none",
    segment_tokens=SEGMENT_TOKENS,
)
"""Segments of 16 KiB."""
DEADLINES: Final = Deadlines(call_s=2.0, grace_s=2.0)
"""Of the engines' calls: on a busy machine a daemon may not run for a quarter of a second. Matches have the daemons'
deadline, after which the daemon answers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the time in seconds since the start of the run, whether its prompt is of the fixed set, the number
    of the prompt, its segments and those found, the milliseconds of the match, and the segments read with wrong
    bytes."""

    at_s: float
    fixed: bool
    number: int
    asked: int
    found: int
    match_ms: float
    wrong: int


class Workload:
    """The prompts of a run, equal in all its engines. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._identity = PayloadIdentity(seed, "default", LAYOUT.fingerprint())
        self._lock = threading.Lock()
        self._draw = random.Random(seed)
        self._requests = 0
        self._fixed = 0

    def draw(self) -> tuple[bool, int]:
        """The next request: (whether it is of the fixed set, number of the prompt)."""
        with self._lock:
            self._requests += 1
            if self._draw.random() < 0.5:
                self._fixed = (self._fixed + 1) % FIXED_PROMPTS
                return True, self._fixed
            newest = FIXED_PROMPTS + RECENT + self._requests // RENEWED
            return False, newest - self._draw.randrange(RECENT)

    def tokens(self, number: int) -> NDArray[np.uint32]:
        """The tokens of a prompt."""
        draw = np.random.default_rng((self._seed, number))
        return draw.integers(0, 1 << 17, PROMPT_SEGMENTS * SEGMENT_TOKENS, dtype=np.uint32)

    def digests(self, tokens: NDArray[np.uint32]) -> list[bytes]:
        """Digests of the segments, for `payload`."""
        return self._identity.digests(tokens, SEGMENT_TOKENS)


@dataclass
class Engine:
    """One engine at the daemon with this local socket: a thread that sends requests at `rate` per second until
    `stop`. Failures of calls are counted, and the engine connects again."""

    socket: Path
    workload: Workload
    rate: float
    began: float
    """`time.monotonic()` at the start of the run."""
    requests: list[Request] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine at {self.socket.stem}", daemon=True)

    def start(self) -> None:
        """Start to send requests."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the request under way and leave the daemon."""
        self._stopping.set()
        self._thread.join()

    def store_fixed(self, numbers: Sequence[int]) -> None:
        """Store these prompts of the fixed set; before `start`. Raises TokenLakeError."""
        with self._connect() as pool:
            for number in numbers:
                self._request(pool, fixed=True, number=number, store=True)

    def _connect(self) -> Pool:
        return Pool.connect(self.socket, LAYOUT, deadlines=DEADLINES)

    def _run(self) -> None:
        pool: Pool | None = None
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            due = max(due + 1 / self.rate, time.monotonic() - 1.0)
            fixed, number = self.workload.draw()
            try:
                pool = pool or self._connect()
                # A segment of the fixed set that is lost stays lost: it would be found again otherwise.
                self.requests.append(self._request(pool, fixed=fixed, number=number, store=not fixed))
            except TokenLakeError as error:
                self.errors.append(f"{self.socket.stem}: {type(error).__name__}: {error}")
                if pool is not None:
                    pool.close()
                pool = None
        if pool is not None:
            pool.close()

    def _request(self, pool: Pool, *, fixed: bool, number: int, store: bool) -> Request:
        """Read the prompt from the pool, compare its bytes, and with `store` store the segments that were not found."""
        tokens = self.workload.tokens(number)
        digests = self.workload.digests(tokens)
        keys = pool.prefix(tokens.tolist()).keys
        at = time.monotonic()
        with pool.match(keys) as lease:
            match_ms = (time.monotonic() - at) * 1e3
            arrays = lease.fetch() if lease.hits else []
            wrong = sum(not check(array, digest) for array, digest in zip(arrays, digests, strict=False))
            found = len(arrays)
            del arrays
        if store and found < len(keys):
            pool.store_all(keys[found:], lambda index, slot: fill(slot, digests[found + index]), found)
        return Request(at - self.began, fixed, number, len(keys), found, match_ms, wrong)
