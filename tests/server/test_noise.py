"""Refusals on both sockets name their reason; hundreds of invalid connections leave nothing behind."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    daemons,
    descriptors_of,
    memory_of,
    outcomes,
    pid_of,
    read,
    store,
    threads_of,
    total,
    wait_until,
)
from tests.server.raw import Raw, hello, identity_of, introduce, peer_address, refusal
from tokenlake.errors import LayoutRefused, LimitReached
from tokenlake.identity import SessionId
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine, pack_frame, peer
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

KEYS = bytes(range(32)) * 2
FRAMES: dict[str, tuple[list[msgspec.Struct], list[msgspec.Struct]]] = {
    "engine": (
        [hello(), hello(session=5), hello(resume=1)],
        [
            engine.Match(1, KEYS, 0.01),
            engine.Attach(2, 7),
            engine.Fetch(3, 9, 0, 4_000_000_000, 0.01),
            engine.Release(((1, 0, 4_000_000_000), (2, 5, 1))),
            engine.Prepare(4, KEYS, 4_294_967_295),
            engine.Prepare(4, KEYS, 0),
            engine.Commit(5, 1, (0, 1, 2, 0), 255, b"x"),
            engine.Abort(1),
            engine.OpenRegion(7, 0, True),
            engine.OpenRegion(8, 99),
            engine.Bye(),
        ],
    ),
    "peer": (
        [
            peer.PeerHello(1, 1, "tokenlake", "stranger", 1, "control", bytes(32)),
            peer.PeerHello(1, 1, "tokenlake", "node1", 1, "bulk", bytes(32)),
            peer.PeerChallenge(1, "tokenlake", "node1", 1, bytes(32), bytes(32)),
            peer.PeerProof(bytes(32)),
            peer.PeerWelcome(),
        ],
        [
            peer.Lookup(1, "default", KEYS),
            peer.LookupReply(1, 1, b"\7\7", ("nobody",), (0.5, 1.0, 0.5), 1e6),
            peer.MarkInFlight("default", KEYS, 1.0),
            peer.Owned("default", KEYS),
            peer.Ping(4, (0.5, 1.0, 0.5), 1e6),
            peer.Pull("default", KEYS),
            peer.Offer(5, "default", KEYS, (0, 1), LAYOUT.segment_bytes, LAYOUT.shards),
            peer.Redundant("default", KEYS, ("nobody",)),
            peer.Corrupt("default", KEYS[:31]),
        ],
    ),
}
"""The first frames of a connection, and further ones; what fields may be is for `tests/fuzz`."""


def noises(seed: int, kind: str) -> Iterator[list[bytes]]:
    """Bytes for each connection: random bytes, half frames, and valid frames in any order."""
    draw = random.Random(seed)
    first, frames = ([pack_frame(each) for each in messages] for messages in FRAMES[kind])
    for round_ in range(300):
        some = draw.choices(frames, k=draw.randrange(1, 6))
        half, body = draw.choice(first + frames), draw.randbytes(draw.randrange(1, 200))
        flipped = bytearray(draw.choice(frames))
        flipped[draw.randrange(4, len(flipped))] ^= 1 << draw.randrange(8)
        yield [
            [draw.randbytes(draw.randrange(1, 3000))],
            [half[: draw.randrange(len(half))]],
            some,
            [draw.choice(first), *some],
            [draw.choice(first), len(body).to_bytes(4, "little") + body],
            [draw.choice(first), bytes(flipped), *some],
        ][round_ % 6]


class Growth:
    """Descriptors, threads and private memory of a daemon, before and after."""

    def __init__(self, node: Node) -> None:
        self.pid = pid_of(node)
        self.descriptors, self.threads, self.memory = self._now()

    def _now(self) -> tuple[int, int, int]:
        return descriptors_of(self.pid), threads_of(self.pid), memory_of(self.pid)

    def check(self) -> None:
        """AssertionError when the daemon grew. A few threads and descriptors belong to pools that fill once."""
        wait_until(lambda: self._now()[0] <= self.descriptors + 4, "descriptors are given back")
        wait_until(lambda: self._now()[1] <= self.threads + 4, "threads have ended")
        assert self._now()[2] < self.memory + (24 << 20)


def make_noise(
    address: Path | tuple[str, int], writes: Iterator[list[bytes]], begin: Callable[[Raw], None] | None = None
) -> None:
    """`begin`: called first on a fifth of the connections, so that their noise comes from an accepted peer."""
    for number, parts in enumerate(writes):
        with Raw(address) as raw:
            if begin is not None and number % 5 == 4:
                begin(raw)
            for part in parts:
                raw.write(part)


def test_noise_on_the_local_socket(node: Node) -> None:
    """It comes from processes that end, because slots that a live process maps are not released."""

    def noise(seed: int) -> None:
        script = (
            "from pathlib import Path; from tests.server.test_noise import noises, make_noise; "
            f"make_noise(Path({str(node.socket)!r}), noises({seed}, 'engine'))"
        )
        subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_S, cwd=Path(__file__).parents[2])

    noise(1)  # Pools and caches that grow once are full now.
    growth = Growth(node)
    noise(2)
    for _ in range(100):
        with Raw.joined(node.socket) as raw:
            raw.send(engine.Prepare(2, bytes(range(32)), 0))
            raw.reply()
    growth.check()
    wait_until(lambda: total(node, "tokenlake_processes") == 0, "the daemon has seen the end of the last process")
    assert total(node, "tokenlake_quarantined_slots") == 0


def test_noise_on_the_peers_port(node: Node, cluster: Cluster) -> None:
    posing = identity_of(cluster.nodes[1])

    def begin(raw: Raw) -> None:
        """A peer with the right name and secret is accepted on a bulk connection; its noise is refused."""
        assert isinstance(introduce(raw, posing, "node0", purpose="bulk"), peer.PeerWelcome)

    make_noise(peer_address(node), noises(3, "peer"), begin)
    growth = Growth(node)
    make_noise(peer_address(node), noises(4, "peer"), begin)
    growth.check()
    wait_until(lambda: total(node, "tokenlake_peers_connected") == 1, "the real peer is still there")


def test_silent_connections_are_bounded(node: Node) -> None:
    growth = Growth(node)
    silent = [Raw(peer_address(node)) for _ in range(200)]
    refused = [raw for raw in silent[100:] if raw.closed()]
    assert len(refused) == 100
    assert node.page("/health")
    for raw in silent:
        raw.sock.close()
    growth.check()


def test_another_layout_in_the_same_session(node: Node, cluster: Cluster) -> None:
    other = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 3}))
    with cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(LayoutRefused, match="'layers' is 3"):
            Pool.connect(node.socket, other, session=pool.engine.session, deadlines=PATIENT)
        same_size = Layout(**(msgspec.structs.asdict(LAYOUT) | {"weights_digest": "11"}))
        with pytest.raises(LayoutRefused, match="'weights_digest' is '11'"):
            Pool.connect(node.socket, same_size, session=pool.engine.session, deadlines=PATIENT)
        with pytest.raises(LimitReached, match="session 999999 does not exist"):
            Pool.connect(node.socket, LAYOUT, session=SessionId(999999), deadlines=PATIENT)
        with pytest.raises(LayoutRefused):
            Pool.connect(node.socket, Layout(**(msgspec.structs.asdict(LAYOUT) | {"dtype": "int3"})))


def test_large_frames_and_wrong_order_are_refused(node: Node) -> None:
    with Raw(node.socket) as raw:
        raw.write((1 << 31).to_bytes(4, "little") + b"x" * 64)
        failed = raw.failed()
        assert str(1 << 31) in failed.reason
        assert raw.closed()
    assert "must be Hello, not Match" in refusal(node.socket, engine.Match(1, b"", 0.1)).reason
    with Raw.joined(node.socket) as raw:
        raw.send(hello(id=2))
        failed = raw.failed()
        assert "twice" in failed.reason
    with Raw.joined(node.socket) as raw:
        raw.send(engine.Match(3, b"x" * 33, 0.1))
        failed = raw.failed()
        assert "33 bytes" in failed.reason


def test_leases_and_writes_of_other_sessions_are_refused(node: Node, cluster: Cluster) -> None:
    prompt = Prompt(77, 3)
    with cluster.connect(0, LAYOUT) as pool, Raw(node.socket) as raw:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        lease = pool.match(keys)
        write = pool.store(pool.prefix(Prompt(78, 2).tokens).keys)
        raw.send(hello())
        raw.reply()
        raw.send(engine.Release(((lease.ids[0], 0, 3),)))
        raw.send(engine.Abort(write.id))
        raw.send(engine.Commit(2, write.id, (0, 1), 3, bytes(32)))
        committed = raw.reply()
        assert isinstance(committed, engine.Committed)
        assert outcomes(committed.codes) == {Code.EXPIRED}
        raw.send(engine.Fetch(3, lease.ids[0], 0, 3, 0.1))
        fetched = raw.reply()
        assert isinstance(fetched, engine.Fetched)
        assert outcomes(fetched.codes) == {Code.LOST}
        raw.send(engine.Attach(4, lease.ids[0]))
        attached = raw.reply()
        assert isinstance(attached, engine.Matched)
        assert attached.hits == 0
        raw.send(engine.OpenRegion(5, 4_000_000_000))
        failed = raw.failed()
        assert "region 4000000000" in failed.reason
        arrays = lease.fetch()
        assert prompt.wrong(arrays) == 0
        for index, array in write.slots:
            Prompt(78, 2).fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        del arrays
        lease.release()


def test_a_daemon_without_free_descriptors_replies() -> None:
    """The daemon refuses the request. Without a reply, the engine would wait and take the daemon for frozen."""
    prompt = Prompt(1, 4)
    with daemons() as cluster, cluster.connect(0, LAYOUT) as pool:
        pid = pid_of(cluster.nodes[0])
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(LimitReached, match="OpenRegion now: Too many open files"):
            pool.store(pool.prefix(prompt.tokens).keys)
        assert pool.engine.timeouts == 0
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
