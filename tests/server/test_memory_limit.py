"""The memory that the documents ask for beyond the arena holds while all limits are used up at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
import grpc
import zmq

from tests.robustness.live import LAYOUT, LIMIT_S, LOW, PATIENT, Prompt, read, store, wait_until
from tests.server.control.scene import CALL_S, certificates, local, raw, served
from tests.server.control.test_limits import plans
from tests.server.control.test_tenants_apart import PLANS, REPORT, channel
from tests.server.kv_events.scene import MODEL, Stream
from tests.server.raw import Raw, hello
from tests.server.scene import BLUE, OF_THIS_USER, RED, private, tenants_text
from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.wire import engine, pack_frame
from tokenlake.wire.slots import join_keys
from tokenlake_client import Pool
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.fork_server import executed

pytestmark = [pytest.mark.live, pytest.mark.rest, pytest.mark.timeout(120)]

MIB = 1 << 20
ARENA_MIB, BEYOND, OF_A_SEGMENT = 64, 200 * MIB, 2048
ATTACK_S = 25.0
GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A cgroup of either version with a limit of memory."""

    def __init__(self, limit: int) -> None:
        """Raises OSError where none can be made."""
        first, second = GROUPS
        self._old = (first / "memory.limit_in_bytes").exists()
        self._above = first if self._old else second
        self._place = self._above / f"tokenlake-test-{os.getpid()}"
        self._place.mkdir()
        try:
            (self._place / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(limit))
        except OSError:
            self._place.rmdir()
            raise

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What this process starts within the block is in the group."""
        (self._place / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._above / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def processes(self) -> list[int]:
        return [int(pid) for pid in (self._place / "cgroup.procs").read_text().split()]

    @property
    def used(self) -> int:
        """Bytes that the kernel cannot take back: without the page cache of files."""
        fields = dict(line.split() for line in (self._place / "memory.stat").read_text().splitlines())
        names = ("total_rss", "total_shmem") if self._old else ("anon", "shmem")
        return sum(int(fields.get(name, 0)) for name in names)

    def close(self) -> None:
        wait_until(lambda: not self.processes, "the daemon has ended")
        self._place.rmdir()


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    segments = ARENA_MIB * MIB // LAYOUT.segment_bytes
    try:
        made = MemoryGroup(ARENA_MIB * MIB + BEYOND + OF_A_SEGMENT * segments)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield made
    finally:
        made.close()


def heavy() -> list[tuple[str, bytes]]:
    """Calls of a scheduler: plans, names of fleets, and trees of long prompts."""
    plan = plans(4000, 200)
    fleet = pb.Fleet(layers=2, segment_bytes=1024, segment_tokens=16, query_bytes=64)
    plan.fleet.MergeFrom(fleet)
    reports = []
    for number in range(32):
        fleet.name = f"{number}".ljust(256, "\N{SNOWMAN}")
        fleet.instances.clear()
        fleet.instances.update({f"{number} {at}".ljust(256, "\N{SNOWMAN}"): "n" * 200 for at in range(200)})
        ended = [pb.Happened(finished=f"{number} {at}".ljust(256, "\N{SNOWMAN}")) for at in range(1024)]
        reports.append((REPORT, pb.ReportRequest(fleet=fleet, happened=ended).SerializeToString()))
    tree = pb.GetPrefixTreeRequest(
        segment_tokens=16,
        prompts=[pb.Prompt(name=f"{at}", tokens=16 * 2000 + 1, keys=os.urandom(64000)) for at in range(30)],
    )
    return [
        (PLANS, plan.SerializeToString()),
        *reports,
        ("/tokenlake.v1.Scheduling/GetPrefixTree", tree.SerializeToString()),
        *_prefetches(),
        (PLANS, b"\x1a\x00" * (MIB - 8)),
    ]


def _prefetches() -> Iterator[tuple[str, bytes]]:
    """Prefetches that pin, and ends of pins, of long prompts."""
    prompt = pb.Prompt(token_ids=os.urandom(4 * 100_000), fingerprint=LAYOUT.fingerprint())
    prefetch = pb.PrefetchRequest(prompt=prompt, source="elsewhere", pin_s=3600.0)
    yield "/tokenlake.v1.Scheduling/Prefetch", prefetch.SerializeToString()
    unpin = pb.UnpinRequest(prompt=prompt, segment_tokens=LAYOUT.segment_tokens)
    yield "/tokenlake.v1.Scheduling/Unpin", unpin.SerializeToString()


class Attacks:
    """Threads that call their functions again and again until the end."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.rounds: dict[str, int] = {}
        self.wrong: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, name: str, attack: Callable[[], object]) -> None:
        def run() -> None:
            while not self.ended.is_set():
                # The daemon refuses and closes what is beyond a limit.
                with contextlib.suppress(OSError, grpc.RpcError, TokenLakeError):
                    try:
                        attack()
                    except AssertionError as error:
                        self.wrong.append(f"{name}: {error}")
                self.rounds[name] = self.rounds.get(name, 0) + 1
                self.ended.wait(0.005)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        self.ended.set()
        for each in self._threads:
            each.join(LIMIT_S)


def joined(node: Node, open_: contextlib.ExitStack, token: str) -> Raw:
    made = open_.enter_context(Raw(node.socket))
    made.send(hello(token=token))
    made.reply()
    made.sock.settimeout(0.5)
    return made


def silent(node: Node, token: str, open_: contextlib.ExitStack) -> None:
    """Connections without a `Hello`, with most of a frame."""
    for _ in range(20):
        each = open_.enter_context(Raw(node.socket))
        each.sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            each.write((64 << 10).to_bytes(4, "little") + bytes((64 << 10) - 1))


def unread(node: Node, token: str, open_: contextlib.ExitStack) -> None:
    """Connections that do not read their answers."""
    names = b"".join(pack_frame(engine.Explain(number, "x" * 64)) for number in range(2, 400))
    for _ in range(12):
        each = joined(node, open_, token)
        with contextlib.suppress(OSError):
            for _ in range(20):
                each.write(names)


def waiting(node: Node, token: str, open_: contextlib.ExitStack) -> None:
    """Long matches at once."""
    for _ in range(12):
        each = joined(node, open_, token)
        with contextlib.suppress(OSError):
            for number in range(2, 34):
                each.write(pack_frame(engine.Match(number, os.urandom(32 * 1024), 2.0, in_flight_wait_s=5.0)))


def contents(node: Node, token: str, open_: contextlib.ExitStack) -> None:
    """Tokens of segments that are never written, in short and long contents."""
    each = joined(node, open_, token)
    each.sock.settimeout(LIMIT_S)
    for number in range(2, 130):
        size = 1 if number % 8 else 500
        offered = tuple(os.urandom(size) for _ in range(400))
        each.send(engine.Prepare(number, os.urandom(32 * 400), 0, contents=offered))
        prepared = each.reply()
        if isinstance(prepared, engine.Prepared) and prepared.write:
            each.send(engine.Abort(prepared.write))


def pins(node: Node, token: str, open_: contextlib.ExitStack) -> None:
    """Prefetches that pin, of segments that no node has and of those of `churn`, whose answers are not read; pins of
    many salts; and ends of pins."""
    pool = open_.enter_context(Pool.connect(node.socket, LAYOUT, token))
    known = join_keys(list(pool.prefix(Prompt(1, 64).tokens).keys))
    for _ in range(4):
        each = joined(node, open_, token)
        with contextlib.suppress(OSError):
            for number in range(2, 200, 4):
                each.write(pack_frame(engine.Prefetch(number, os.urandom(32 * 256), source="elsewhere", pin_s=3600.0)))
                each.write(pack_frame(engine.Prefetch(number + 1, known, pin_s=3600.0)))
                hints = Hints(account=os.urandom(16).hex(), pin_s=3600.0)
                each.write(pack_frame(engine.Hint(known, hints)))
                each.write(pack_frame(engine.Prepare(number + 2, os.urandom(32 * 16), 0, hints=hints)))
                each.write(pack_frame(engine.Unpin(os.urandom(32 * 128))))


def engines(node: Node, token: str, attack: Callable[..., None], ended: threading.Event) -> None:
    with contextlib.ExitStack() as open_:
        attack(node, token, open_)
        ended.wait(0.2)


def subscribers(streams: list[Stream], open_: contextlib.ExitStack) -> None:
    """Readers of events and replays that take nothing."""
    context = open_.enter_context(zmq.Context())
    context.linger = 0
    for stream, number in itertools.product(streams, range(28)):
        kind = zmq.SUB if number % 2 else zmq.DEALER
        sock = open_.enter_context(context.socket(kind))
        sock.setsockopt(zmq.RCVHWM, 1)
        sock.setsockopt(zmq.RCVBUF, 4096)
        sock.connect(stream.endpoints[kind == zmq.DEALER])
        if kind == zmq.SUB:
            for topic in range(50):
                sock.subscribe(stream.topic[:topic].encode())
        else:
            for _ in range(20):
                sock.send_multipart([b"", (0).to_bytes(8, "big")], zmq.NOBLOCK)


def churn(pool: Pool, seeds: Iterator[int]) -> None:
    """Store a prompt with its tokens, and read an earlier one."""
    seed = next(seeds)
    prompt = Prompt(seed, 64)
    prefix = pool.prefix(prompt.tokens)
    contents = pool.engine.contents(prefix, prompt.tokens, range(prompt.segments), MODEL)
    pool.store_all(prefix.keys, prompt.fill, patience=1.0, hints=LOW, contents=contents)
    read(pool, Prompt(max(1, seed - 90), 64))


def test_the_documented_memory_holds_under_all_limits(group: MemoryGroup, tmp_path: Path) -> None:
    """Two tenants use up all that they may have, with a disk; the daemon lives, and serves both afterwards."""
    streams = [Stream("node0"), Stream("node0")]
    text = tenants_text(blue=OF_THIS_USER) + streams[0].toml(tenant="red") + streams[1].toml(tenant="blue")
    config, disk = private(tmp_path / "c.toml", text), tmp_path / "disk"
    disk.mkdir(0o700)
    cluster = Cluster(1, f"{ARENA_MIB}MiB", "1MiB", config=config, disk=f"{disk}:300MiB", match_deadline_ms="2000")
    (address,) = served(cluster).values()
    attacks, node, peak = Attacks(), cluster.nodes[0], 0
    with contextlib.ExitStack() as open_:
        with executed(), group.entered():
            open_.enter_context(cluster)
        assert node.process is not None
        assert node.process.pid in group.processes
        open_.callback(attacks.stop)
        held = [certificates(cluster.directory / "ca", f"s-{name}", "scheduler", name) for name in ("red", "blue")]
        pools = [
            open_.enter_context(Pool.connect(node.socket, LAYOUT, each, deadlines=PATIENT)) for each in (RED, BLUE)
        ]
        start = group.used
        subscribers(streams, open_)
        calls = heavy()
        for at, (own, token, pool) in enumerate(zip(held, (RED, BLUE), pools, strict=True)):
            attacks.start(f"churn {at}", partial(churn, pool, itertools.count(10_000 * at + 1)))
            for attack in (silent, unread, waiting, contents, pins):
                run = partial(engines, node, token, attack, attacks.ended)
                attacks.start(f"{attack.__name__} {at}", run)
            for wire in range(2):
                busy = open_.enter_context(channel(address, own))
                turns = itertools.cycle(calls)
                attacks.start(f"calls {at} {wire}", partial(_call, busy, turns))
        operator = open_.enter_context(raw(node))
        follow = "/tokenlake.v1.Events/Subscribe"
        open_.enter_context(contextlib.closing(_Streams(operator, follow)))
        until = time.monotonic() + ATTACK_S
        while time.monotonic() < until and node.running:
            peak = max(peak, group.used)
            attacks.ended.wait(0.1)
        attacks.stop()
        status = node.process.poll()
        figures = f"{start / MIB:.0f} -> {peak / MIB:.0f} MiB; {attacks.rounds}"
        assert status is None, f"the daemon ended with the status {status}: {figures}"
        assert not attacks.wrong
        assert len(attacks.rounds) == 16, figures
        with local(node) as control:
            assert control.status().node == "node0"
        for at, pool in enumerate(pools):
            prompt = Prompt(900_000 + at, 3)
            store(pool, prompt)
            assert read(pool, prompt) == 3


def _call(busy: Any, turns: Iterator[tuple[str, bytes]]) -> None:
    under_way = [busy.unary_unary(path).future(body, timeout=CALL_S) for path, body in itertools.islice(turns, 12)]
    for each in under_way:
        with contextlib.suppress(grpc.RpcError):
            each.result()


class _Streams:
    """Calls of an operator whose answers are not read."""

    def __init__(self, made: Any, path: str) -> None:
        self._calls = [made.unary_stream(path)(b"", timeout=60) for _ in range(24)]

    def close(self) -> None:
        for each in self._calls:
            each.cancel()
