"""An engine process of the soak: well-behaved and faulty engine actions, with every byte that it reads compared.

It appends what it did and found to a file, as JSON lines, so that the record survives a kill. It works until it gets a
byte on its standard input; then it gives everything back, and ends when that input ends.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, TokenLakeError, Unreachable
from tokenlake.wire import Code
from tokenlake_bench import payload
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_bench.soak.load import GROUPS, SEGMENT_TOKENS, Tokens, draw_prompt
from tokenlake_client import Lease, Pool, Write

CONNECT_S: Final = 60.0
SLICE_S: Final = 1.0
"""Seconds of work between two reports; a killed process loses its counts since its last report."""
MATCH_S: Final = 0.2
FETCH_S: Final = 1.0
KEPT: Final = 12
"""Maximum number of leases, views and writes that one engine holds at a time, which bounds the memory that it takes."""
LONGEST_HOLD_S: Final = 15.0
"""Maximum of the random seconds for which an engine of the soak holds a lease or a write. It is longer than a lease
lasts without renewal (a live session renews it), and longer than the daemon lets a write stay open."""
JUNK: Final = 0xEE
"""Byte with which an engine fills slots whose segment must never be read, so that a read of it is detected."""


@dataclass(slots=True)
class _Held:
    """Something that the engine keeps until the time `until`: views to compare again, a lease to release late, or a
    write to commit or abort late."""

    until: float
    lease: Lease | None = None
    arrays: list[NDArray[np.uint8]] | None = None
    digests: list[bytes] | None = None
    write: Write | None = None


class SoakEngine:
    """The actions of one engine process that belongs to one group (tenant and layout); `rate` actions per second on
    average."""

    def __init__(self, pool: Pool, seed: int, name: str, rate: float, record: Path) -> None:
        self._pool = pool
        self._seed = seed
        self._rate = rate
        self._record = record
        self._draw = random.Random(f"{name} {seed}")
        self._identity = PayloadIdentity(seed, pool.engine.tenant, pool.layout.fingerprint())
        self._client = LiveClient(pool, seed, window=8)
        self._held: list[_Held] = []
        self._counts: Counter[str] = Counter()
        self._next = time.monotonic()
        self._actions = {
            self._serve: 12,
            self._hold: 4,
            self._lease_only: 2,
            self._copy: 3,
            self._cancel: 1,
            self._abort: 1,
            self._commit_late: 2,
        }

    def work(self, seconds: float) -> None:
        """Run actions for a number of seconds, and report their counts."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._end_due()
            self._try(self._draw.choices(list(self._actions), list(self._actions.values()))[0])
            self._next = max(self._next + self._draw.expovariate(self._rate), time.monotonic())
            time.sleep(max(0.0, min(self._next, until) - time.monotonic()))
        self._report(False)

    def drain(self) -> None:
        """Release all leases and end all writes, but stay connected, and report."""
        while self._held:
            self._end(self._held.pop())
        self._report(True)

    def _report(self, drained: bool) -> None:
        self._write({"drained": drained, "counts": dict(self._counts)})
        self._counts.clear()

    def _write(self, line: dict[str, object]) -> None:
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- actions

    def _serve(self, tokens: Tokens) -> None:
        served = self._client.serve(tokens)
        self._counts["requests"] += 1
        self._counts["segments compared"] += served.hits
        self._counts["segments from other nodes"] += len(served.remote)
        self._counts["segments stored"] += served.stored[Code.COMMITTED]
        self._counts["segments refused"] += sum(n for code, n in served.stored.items() if code.refused)
        self._counts["calls without an answer"] += served.failures
        if served.wrong_segments:
            self._wrong("serve", served.wrong_segments, served.wrong_bytes)

    def _hold(self, tokens: Tokens) -> None:
        """An action: close a lease while arrays over its segments are still in use, and compare the arrays again
        later."""
        digests = self._identity.digests(tokens, SEGMENT_TOKENS)
        with self._match(tokens) as lease:
            arrays = lease.fetch(deadline_s=FETCH_S)
        self._compare("hold", arrays, digests)
        if arrays:
            self._keep(_Held(self._later(), arrays=arrays, digests=digests))

    def _lease_only(self, tokens: Tokens) -> None:
        self._keep(_Held(self._later(), lease=self._match(tokens)))

    def _copy(self, tokens: Tokens) -> None:
        digests = self._identity.digests(tokens, SEGMENT_TOKENS)
        out = np.empty((len(digests), self._pool.layout.segment_bytes), np.uint8)
        with self._match(tokens) as lease:
            copied = lease.copy_into(list(out), deadline_s=FETCH_S)
        self._compare("copy", list(out[:copied]), digests)

    def _cancel(self, tokens: Tokens) -> None:
        self._pool.engine.begin_match(self._pool.prefix(tokens).keys, deadline_s=MATCH_S).cancel()

    def _abort(self, tokens: Tokens) -> None:
        write = self._pool.store(self._pool.prefix(tokens).keys)
        for _, slot in write.slots:
            slot[:] = JUNK
        write.abort()
        self._counts["writes aborted"] += 1

    def _commit_late(self, tokens: Tokens) -> None:
        """An action: reserve slots and commit them later, mostly in time, sometimes after the reservation's deadline.
        Until then the slots hold junk."""
        digests = self._identity.digests(tokens, SEGMENT_TOKENS)
        write = self._pool.store(self._pool.prefix(tokens).keys)
        for _, slot in write.slots:
            slot[:] = JUNK
        self._keep(_Held(self._later(), write=write, digests=digests))

    # -- inside

    def _match(self, tokens: Tokens) -> Lease:
        return self._pool.match(self._pool.prefix(tokens).keys, deadline_s=MATCH_S)

    def _later(self) -> float:
        return time.monotonic() + LONGEST_HOLD_S * self._draw.random() ** 3

    def _keep(self, held: _Held) -> None:
        if len(self._held) == KEPT:
            self._end(self._held.pop(0))
        self._held.append(held)

    def _end_due(self) -> None:
        now = time.monotonic()
        due = [held for held in self._held if held.until <= now]
        self._held = [held for held in self._held if held.until > now]
        while due:
            self._end(due.pop())

    def _end(self, held: _Held) -> None:
        try:
            if held.arrays is not None and held.digests is not None:
                self._compare("held views", held.arrays, held.digests)
                self._counts["segments compared after a hold"] += len(held.arrays)
            if held.lease is not None:
                held.lease.release()
                self._counts["leases released late"] += 1
            if held.write is not None and held.digests is not None:
                for index, slot in held.write.slots:
                    payload.fill(slot, held.digests[index])
                codes = held.write.commit()
                self._counts["segments stored"] += codes.count(Code.COMMITTED)
                self._counts["segments committed too late"] += codes.count(Code.EXPIRED)
        except TokenLakeError as error:
            self._failed(error)

    def _try(self, action: object) -> None:
        try:
            action(draw_prompt(self._seed, self._draw))  # type: ignore[operator]
        except TokenLakeError as error:
            self._failed(error)

    def _failed(self, error: TokenLakeError) -> None:
        if isinstance(error, DeadlinePassed):
            self._counts["calls without an answer"] += 1
        elif isinstance(error, Unreachable):
            self._counts["calls while the daemon was away"] += 1
        else:
            self._counts[f"refused: {type(error).__name__}"] += 1

    def _compare(self, what: str, arrays: list[NDArray[np.uint8]], digests: list[bytes]) -> None:
        self._counts["segments compared"] += len(arrays)
        for array, digest in zip(arrays, digests, strict=False):
            if nbytes := payload.wrong_bytes(array, digest):
                self._wrong(what, 1, nbytes)

    def _wrong(self, what: str, segments: int, nbytes: int) -> None:
        self._write({"wrong": what, "segments": segments, "bytes": nbytes})


def _connect(socket: str, token: str, group: int) -> Pool:
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            return Pool.connect(socket, GROUPS[group].layout, token)
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main(socket: str, token: str, group: str, seed: str, name: str, rate: str, record: str) -> None:
    """The main function of the engine process: connect to the daemon, which may still be starting, and work."""
    pool = _connect(socket, token, int(group))
    engine = SoakEngine(pool, int(seed), name, float(rate), Path(record))
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        engine.work(SLICE_S)
    engine.drain()
    sys.stdin.read()
    pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
