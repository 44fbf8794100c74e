"""Hundreds of invalid connections on both sockets: the daemon continues to serve and does not grow."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, descriptors_of, memory_of, pid_of, threads_of, total, wait_until
from tests.server.raw import Raw, hello, identity_of, introduce, peer_address
from tokenlake.wire import engine, pack_frame, peer
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
