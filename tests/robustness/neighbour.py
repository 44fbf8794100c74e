"""A tenant that does its worst, and the reads of another tenant on the same node meanwhile.

`python -m tests.robustness.neighbour KIND SOCKET` is the tenant that does its worst.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.query.raw import memfd, raw_engine
from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, outcomes, store
from tests.server import raw as server
from tests.server.scene import BLUE, RED, tenants
from tokenlake.errors import TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine, pack_frame
from tokenlake.wire import query as wire
from tokenlake.wire.engine import HERE
from tokenlake.wire.slots import join_keys
from tokenlake_client import Deadlines, Pool
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster, Node

PROMPTS, SEGMENTS, ROUNDS = 16, 8, 20
HEADS, SCALE = 4, 0.2
DEADLINES = Deadlines(call_s=1.0, match_s=1.0)
"""Deadlines of the tenant that reads: less than the time for which one frame may hold a loop without limits, and more
than a busy machine needs."""
PAUSE_S = 0.001
"""Pause between two attempts that the daemon refuses."""


class Reads(NamedTuple):
    """What a tenant stored and read."""

    asked: int
    hits: int
    wrong: int
    """Segments with other bytes than were written."""
    lost: int
    """Queries without a result."""


def read_all(node: Node, seed: int, *, queries: bool) -> Reads:
    """Connect an engine of tenant blue, store `PROMPTS` prompts and read each `ROUNDS` times."""
    prompts = [Prompt(seed + number, SEGMENTS) for number in range(PROMPTS)]
    hits = wrong = lost = 0
    with Pool.connect(node.socket, LAYOUT, BLUE, deadlines=DEADLINES) as pool:
        for prompt in prompts:
            codes = outcomes(store(pool, prompt))
            assert codes <= {Code.COMMITTED, Code.EXISTS}, codes
        for prompt in prompts * ROUNDS:
            with pool.match(pool.prefix(prompt.tokens).keys) as lease:
                arrays = lease.fetch()
                hits += len(arrays)
                wrong += prompt.wrong(arrays)
                del arrays
        if queries:
            lost = sum(_lost(pool, prompt) for prompt in prompts)
    return Reads(PROMPTS * SEGMENTS * ROUNDS, hits, wrong, lost)


def _lost(pool: Pool, prompt: Prompt) -> int:
    """Query a prompt in each layer; the number of queries without a result."""
    lease = pool.match(pool.prefix(prompt.tokens).keys)
    try:
        view = pool.queries.open_view(lease, HEADS, SCALE, deadline_s=DEADLINES.call_s)
    except TokenLakeError:
        lease.release()
        return LAYOUT.layers
    with view, pool.queries.init_query([(view, 2)]) as buffer:
        buffer.queries[...] = 0
        answers = [
            pool.queries.query(buffer, layer, deadline_s=DEADLINES.call_s).wait() for layer in range(LAYOUT.layers)
        ]
        return sum(bool(answer.lost) for answer in answers)


# -- the worst


def sessions(node: Path) -> Iterator[None]:
    """Open sessions and connections that say nothing, until they are refused, and hold them."""
    held: list[server.Raw] = []
    while True:
        with contextlib.suppress(OSError):
            raw = server.Raw(node)
            if len(held) % 2:
                raw.send(server.hello(token=RED))
                reply = raw.body()
                if not reply or isinstance(engine.reply_decoder.decode(reply), engine.Failed):
                    raw.sock.close()
                    time.sleep(PAUSE_S)
            held.append(raw)
        if len(held) > 800:
            held.pop(0).sock.close()
        yield


def memory(node: Path) -> Iterator[None]:
    """Store prompts and lease each of them, releasing none."""
    with Pool.connect(node, LAYOUT, RED, deadlines=PATIENT) as pool:
        leases = []
        for seed in range(1 << 30):
            prompt = Prompt(seed, SEGMENTS)
            with contextlib.suppress(TokenLakeError):
                store(pool, prompt, 0.0)
                leases.append(pool.match(pool.prefix(prompt.tokens).keys))
                leases[-1].fetch()
            yield


def loop(node: Path) -> Iterator[None]:
    """Send the requests that take longest over several connections at once, and read no reply."""
    draw = random.Random(1)
    prompt = Prompt(1, SEGMENTS)
    with Pool.connect(node, LAYOUT, RED, deadlines=PATIENT) as pool:
        store(pool, prompt)
        keys = join_keys(pool.prefix(prompt.tokens).keys)
    longest: list[Callable[[int], bytes]] = [
        lambda lease: pack_frame(engine.Release(((lease, 0, 1),) * 260_000)),
        lambda lease: pack_frame(engine.Match(3, draw.randbytes(KEY_BYTES * 65_536), 1e9)),
        lambda lease: b"".join(pack_frame(engine.Heartbeat(number)) for number in range(10_000)),
        lambda lease: b"".join(pack_frame(engine.Match(number, keys, 1e9)) for number in range(1_000)),
    ]
    for frame in itertools.cycle(longest):
        left: dict[socket.socket, memoryview] = {}
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(8):
                raw = stack.enter_context(server.Raw(node))
                raw.send(server.hello(token=RED))
                raw.body()
                raw.send(engine.Match(2, keys, 1e9))
                matched = raw.reply()
                assert isinstance(matched, engine.Matched)
                left[raw.sock] = memoryview(frame(matched.lease))
                raw.sock.setblocking(False)
            until = time.monotonic() + 1.0
            while left and time.monotonic() < until:
                for sock in select.select([], left, [], PAUSE_S)[1]:
                    left[sock] = left[sock][sock.send(left[sock]) :]
                    if not left[sock]:
                        del left[sock]
        yield


def queries(node: Path) -> Iterator[None]:
    """Huge queries without an end to their deadline, and pipelined requests for connections to the query engine."""
    prompt, tokens = Prompt(1, 64), 1 << 15
    outputs = tokens * HEADS * LAYOUT.key_dim * 4
    nbytes = 2 * outputs + tokens * HEADS * 4
    with Pool.connect(node, LAYOUT, RED, deadlines=PATIENT) as pool, contextlib.ExitStack() as stack:
        store(pool, prompt)
        lease = stack.enter_context(pool.match(pool.prefix(prompt.tokens).keys))
        keys = join_keys(lease.keys[: lease.hits])
        while True:
            with contextlib.suppress(OSError, TokenLakeError, AssertionError), raw_engine(pool) as raw:
                raw.send(wire.OpenView(1, "", b"", keys, (), bytes([HERE]) * lease.hits, HEADS, SCALE))
                raw.receive()
                descriptor = memfd(nbytes)
                with contextlib.closing(socket.socket(fileno=os.dup(raw.sock.fileno()))):
                    for number in range(1, 17):
                        raw.send(wire.OpenBuffer(number, nbytes), descriptor=descriptor)
                        raw.send(wire.Step(number, 1, "float32", ((1, tokens),), 0, outputs, 2 * outputs))
                os.close(descriptor)
                with server.Raw(node) as opening:
                    opening.send(server.hello(token=RED))
                    opening.body()
                    for attempt in range(1, 11):
                        for number in range(1, 17):
                            raw.send(wire.Query(number, 1, 0, attempt, 1e9))
                        opening.write(b"".join(pack_frame(engine.OpenQuery(number)) for number in range(2, 252)))
                        for _ in range(16):
                            raw.receive()
                            yield
            yield


WORST: dict[str, tuple[Callable[[Path], Iterator[None]], int]] = {
    "sessions": (sessions, 700),
    "memory": (memory, 80),
    "loop": (loop, 4),
    "queries": (queries, 4),
}
"""Each kind of the worst, and the number of steps until it is under way."""


@contextlib.contextmanager
def worst(kind: str, node: Node) -> Iterator[None]:
    """A process of tenant red that does its worst, of one kind, from before the start of the block to its end."""
    command = [sys.executable, "-m", "tests.robustness.neighbour", kind, str(node.socket)]
    process = start_child(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    try:
        assert process.stdout is not None
        assert process.stdout.read(6) == b"begun\n"
        yield
        assert process.poll() is None, f"tenant red ended with status {process.returncode}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def neighbours(*, query_engine: bool) -> Iterator[Cluster]:
    """One node with two tenants, each of which may use half of the memory."""
    with tempfile.TemporaryDirectory() as directory:
        file = tenants(Path(directory), red="quota = 0.5", blue="quota = 0.5")
        settings = {"query_engine": "true"} if query_engine else {}
        with daemons(1, "16MiB", config=file, **settings) as cluster:
            yield cluster


def _do(kind: str, node: Path) -> None:
    """Does not return."""
    do, steps = WORST[kind]
    for step, _ in enumerate(do(node)):
        if step == steps:
            print("begun", flush=True)


if __name__ == "__main__":
    _do(sys.argv[1], Path(sys.argv[2]))
