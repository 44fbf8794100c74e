"""`tokenlake bench control-plane`: the duration of calls of the control plane against a bare echo of grpc.aio, and what
100 calls a second cost the matches of an engine.

All figures come from one run. Calls and echoes take turns, and so do rounds with and without calls. The caller and the
echo server are processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.layout import Layout
from tokenlake.wire.slots import join_keys
from tokenlake_bench.report import Quantiles, write_json
from tokenlake_client import Deadlines, Pool
from tokenlake_client.control import Control
from tokenlake_proto.v1 import scheduling_pb2
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster

LAYOUT = Layout(
    model_id="bench",
    weights_digest="0",
    dtype="float16",
    layers=2,
    kv_heads=2,
    key_dim=32,
    value_dim=32,
    position="none",
    segment_tokens=16,
)
SEGMENTS = 128
"""Segments of a match, and of the long prompt of a scheduler's lookup."""
SHORT = 16
"""Segments of the short prompt."""
WARM_UP = 50
BURST = 20
"""Calls of one kind before the next kind has its turn."""
START_S = 30.0
ECHO = "/echo/Echo"


class ControlPlaneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the command. Times are milliseconds."""

    echo: Quantiles
    """A bare echo of grpc.aio of a message of the size of a status, over a Unix socket."""
    calls: dict[str, Quantiles]
    p50_over_echo: dict[str, float]
    matches_quiet: Quantiles
    """Matches of 128 segments of the node, medians of the rounds."""
    matches_beside_calls: Quantiles
    p50_ratio: float
    p99_ratio: float
    calls_per_s: float
    """Calls per second that were made beside the matches."""
    rounds: int
    calls_of_each: int


def run_control_plane(
    calls: int = 400, rounds: int = 5, seconds: float = 4.0, rate: float = 100.0, json_file: Path | None = None
) -> ControlPlaneResult:
    """Measure and print. `calls`: of each kind. `seconds`: of a round of matches. `rate`: calls per second."""
    with Cluster(1, "64MiB", "16MiB") as cluster, _connect(cluster) as pool:
        socket = cluster.nodes[0].socket.with_suffix(".control")
        keys = pool.prefix(range(SEGMENTS * LAYOUT.segment_tokens)).keys
        pool.store_all(keys, lambda index, slot: None)
        with Control.local(socket) as control, _echo(cluster.directory / "echo.sock") as echo:
            short, long = _lookup(keys[:SHORT]), _lookup(keys)
            body = bytes(control.status().ByteSize())
            kinds: dict[str, Callable[[], object]] = {
                "echo": lambda: echo(body, timeout=5),
                "status": control.status,
                "cluster": control.cluster,
                "prefix tree of 16 segments": lambda: control.prefix_tree(short),
                "prefix tree of 128 segments": lambda: control.prefix_tree(long),
            }
            times = _take_turns(kinds, calls)
        quiet, beside, made = _matches(pool, keys, socket, rounds, seconds, rate)
    measured = {name: _quantiles(each) for name, each in times.items()}
    result = ControlPlaneResult(
        echo=measured["echo"],
        calls={name: each for name, each in measured.items() if name != "echo"},
        p50_over_echo={
            name: each.p50_ms / measured["echo"].p50_ms for name, each in measured.items() if name != "echo"
        },
        matches_quiet=quiet,
        matches_beside_calls=beside,
        p50_ratio=beside.p50_ms / quiet.p50_ms,
        p99_ratio=beside.p99_ms / quiet.p99_ms,
        calls_per_s=made,
        rounds=rounds,
        calls_of_each=calls,
    )
    _print(result)
    if json_file is not None:
        write_json(result, json_file)
    return result


def _connect(cluster: Cluster) -> Pool:
    # A busy machine may not run a process for longer than the default deadline; such a call is a slow one here.
    cluster.deadlines = Deadlines(call_s=2.0, match_s=2.0)
    return cluster.connect(0, LAYOUT)


def _lookup(keys: Sequence[SegmentKey]) -> scheduling_pb2.GetPrefixTreeRequest:
    """A scheduler's lookup of one prompt."""
    size = LAYOUT.segment_tokens
    prompt = scheduling_pb2.Prompt(name="r", keys=join_keys(list(keys)), tokens=len(keys) * size + 1)
    return scheduling_pb2.GetPrefixTreeRequest(prompts=[prompt], segment_tokens=size)


def _take_turns(kinds: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    """Milliseconds of `calls` calls of each kind, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for call in kinds.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(0, calls, BURST):
        for name, call in kinds.items():
            for _ in range(BURST):
                began = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - began))
    return times


def _matches(
    pool: Pool, keys: Sequence[SegmentKey], socket: Path, rounds: int, seconds: float, rate: float
) -> tuple[Quantiles, Quantiles, float]:
    """The quantiles of matches without and beside calls, medians of the rounds, and the calls per second."""
    found: dict[bool, list[Quantiles]] = {False: [], True: []}
    made = []
    _round(pool, keys, 1.0)
    for _ in range(rounds):
        found[False].append(_round(pool, keys, seconds))
        with _caller(socket, rate) as count:
            found[True].append(_round(pool, keys, seconds))
        made.append(count())
    return _median(found[False]), _median(found[True]), statistics.median(made)


def _round(pool: Pool, keys: Sequence[SegmentKey], seconds: float) -> Quantiles:
    times = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        pool.match(keys).release()
        times.append(1e3 * (time.perf_counter() - began))
    return _quantiles(times)


def _quantiles(times: list[float]) -> Quantiles:
    ordered = sorted(times)
    return Quantiles(ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))])


def _median(rounds: list[Quantiles]) -> Quantiles:
    return Quantiles(
        statistics.median(each.p50_ms for each in rounds), statistics.median(each.p99_ms for each in rounds)
    )


@contextmanager
def _echo(path: Path) -> Iterator[Callable[..., bytes]]:
    """An echo server in a process of its own."""
    child = start_child([sys.executable, "-m", __name__, "echo", str(path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with grpc.insecure_channel(f"unix:{path}") as channel:
            yield channel.unary_unary(ECHO)
    finally:
        child.terminate()
        child.communicate()


@contextmanager
def _caller(socket: Path, rate: float) -> Iterator[Callable[[], float]]:
    """A process that calls the control plane. Yields a function that gives its calls per second, once it has ended."""
    child = start_child(
        [sys.executable, "-m", __name__, "call", str(socket), str(rate)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.readline()
    made: list[float] = []
    try:
        yield lambda: made[0]
    finally:
        made.append(float(child.communicate()[0] or 0))


def _print(result: ControlPlaneResult) -> None:
    table = Table("call", "p50 ms", "p99 ms", "p50 / echo")
    rows = {"echo of grpc.aio": result.echo, **result.calls}
    for name, each in rows.items():
        ratio = result.p50_over_echo.get(name)
        table.add_row(name, f"{each.p50_ms:.3f}", f"{each.p99_ms:.3f}", "" if ratio is None else f"{ratio:.2f}")
    console = Console()
    console.print(table)
    table = Table("matches of 128 segments", "p50 ms", "p99 ms")
    for name, each in (("quiet", result.matches_quiet), ("beside calls", result.matches_beside_calls)):
        table.add_row(name, f"{each.p50_ms:.3f}", f"{each.p99_ms:.3f}")
    table.add_row("ratio", f"{result.p50_ratio:.2f}", f"{result.p99_ratio:.2f}")
    console.print(table)
    console.print(f"{result.calls_per_s:.0f} calls per second")


# -- the children


async def _serve_echo(path: str) -> None:
    async def echo(body: bytes, context: object) -> bytes:
        return body

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            """The echo, whatever the method."""
            return grpc.unary_unary_rpc_method_handler(echo)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def _call(path: str, rate: float) -> None:
    """Make calls at a steady rate until stdin ends, then print how many per second they were. They take turns: four of
    an operator, and a scheduler's lookup of 128 segments that no node has."""
    unknown = _lookup([SegmentKey(os.urandom(KEY_BYTES)) for _ in range(SEGMENTS)])
    with Control.local(path) as control:
        kinds: list[Callable[[], object]] = [
            control.status,
            control.cluster,
            control.config,
            lambda: control.explain(""),
            lambda: control.prefix_tree(unknown),
        ]
        control.status()
        print("ready", flush=True)
        began = time.perf_counter()
        made = 0
        while True:
            late_s = time.perf_counter() - (began + made / rate)
            if select.select([sys.stdin], [], [], max(0.0, -late_s))[0]:
                break
            kinds[made % len(kinds)]()
            made += 1
        print(made / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        asyncio.run(_serve_echo(sys.argv[2]))
    else:
        _call(sys.argv[2], float(sys.argv[3]))
