"""Everything a daemon refuses, at its start and on its sockets, says what is wrong; and the daemon serves on."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    Prompt,
    daemons,
    descriptors_of,
    memory_of,
    outcomes,
    read,
    store,
    threads_of,
    total,
    wait_until,
)
from tests.server.raw import Raw, hello, identity_of, introduce, peer_address, refusal
from tokenlake.errors import CredentialRefused, LayoutRefused, LimitReached, Refused
from tokenlake.identity import SessionId
from tokenlake.layout import Layout
from tokenlake.wire import PROTOCOL_VERSION, Code, engine, pack_frame, peer
from tokenlake_bench.cluster import Cluster, Node, free_port
from tokenlake_client import Pool

pytestmark = pytest.mark.live

SERVE = [sys.executable, "-m", "tokenlake_server"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        yield cluster


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    """A daemon that serves before and after."""
    yield cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        prompt = Prompt(random.randrange(1 << 30), 3)
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3


def start(tmp_path: Path, *flags: str, environment: dict[str, str] | None = None) -> str:
    """What a daemon that does not start says; it must end with status 1 or 2 and no traceback."""
    given = {word for word in flags if word.startswith("--")}
    defaults = {
        "--node": "x",
        "--memory": "1MiB",
        "--socket": str(tmp_path / "x.sock"),
        "--listen": "127.0.0.1:0",
        "--metrics": "",
    }
    words = [word for name, value in defaults.items() if name not in given for word in (name, value)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    ended = subprocess.run(
        [*SERVE, *words, *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean | (environment or {}),
        check=False,
    )
    assert ended.returncode in (1, 2), ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert not (tmp_path / "x.sock").exists()
    return ended.stderr


# -- at the start


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    assert "memory" in start(tmp_path, "--memory", "lots")
    assert "No such option" in start(tmp_path, "--memroy", "1GiB")
    assert "lease_s" in start(tmp_path, "--lease-s", "-1")
    assert "TOKENLAKE_MEMROY" in start(tmp_path, environment={"TOKENLAKE_MEMROY": "1GiB"})
    file = tmp_path / "tokenlake.toml"
    file.write_text("memroy = '1GiB'\n")
    message = start(tmp_path, "--config", str(file))
    assert "memroy" in message
    assert "'memory'" in message
    file.write_text("memory = \n")
    assert "file" in start(tmp_path, "--config", str(file))
    assert str(tmp_path / "none.toml") in start(tmp_path, "--config", str(tmp_path / "none.toml"))
    assert "record" in start(tmp_path, "--record", str(tmp_path / "no" / "such" / "log"))
    file.write_text(f"arena_directory = '{tmp_path / 'nowhere'}'\n")
    assert "arena_directory" in start(tmp_path, "--config", str(file))


def test_only_loopback_is_listened_on(tmp_path: Path) -> None:
    for setting in ("--listen", "--metrics"):
        message = start(tmp_path, setting, "0.0.0.0:0" if setting == "--listen" else "[::]:7440")
        assert setting.strip("-") in message
        assert "loopback" in message


def test_addresses_in_use(tmp_path: Path, node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for setting in ("listen", "metrics"):
            message = start(tmp_path, f"--{setting}", taken)
            assert f"'{setting}'" in message
            assert taken in message
    message = start(tmp_path, "--socket", str(node.socket))
    assert "'socket'" in message
    assert "other daemon" in message
    (tmp_path / "a-file").write_text("mine")
    assert "'socket'" in start(tmp_path, "--socket", str(tmp_path / "a-file"))
    assert (tmp_path / "a-file").read_text() == "mine"
    assert "'socket'" in start(tmp_path, "--socket", str(tmp_path / "no" / "such" / "directory.sock"))


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    before = _available()
    message = start(tmp_path, "--memory", "1TiB")
    assert "'memory' asks for 1TiB" in message
    assert "available" in message
    assert _available() > before // 2, "nothing was touched"


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def test_a_stale_socket_is_replaced_and_the_end_is_clean() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.kill()
        assert stat.S_ISSOCK(node.socket.stat().st_mode), "a killed daemon leaves its socket"
        node.start()
        cluster.wait_ready()
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o660
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, 2))
            assert node.stop() == 0
            assert not node.socket.exists()
        node.start()
        cluster.wait_ready()
        assert node.process is not None
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(LIMIT_S) == 0


# -- on the local socket


def test_another_protocol_version(node: Node) -> None:
    failed = refusal(node.socket, hello(oldest_version=PROTOCOL_VERSION + 1, newest_version=PROTOCOL_VERSION + 3))
    assert failed.kind == "ProtocolRefused"
    assert f"versions {PROTOCOL_VERSION + 1} to {PROTOCOL_VERSION + 3}" in failed.reason


def test_a_probe_hash_that_differs(node: Node) -> None:
    failed = refusal(node.socket, hello(probe=bytes(32)))
    assert (failed.kind, "probe hash" in failed.reason) == ("ProtocolRefused", True)


def test_layouts_that_cannot_be_served(node: Node) -> None:
    plain = msgspec.msgpack.decode(LAYOUT.encode())

    def changed(name: str, value: object) -> bytes:
        pairs = [[field, value if field == name else former] for field, former in plain[1]]
        return msgspec.msgpack.encode([plain[0], pairs])

    for name, value in (("dtype", "int3"), ("attention", "linear"), ("layers", 0)):
        failed = refusal(node.socket, hello(layout=changed(name, value)))
        assert failed.kind == "LayoutRefused"
        assert name in failed.reason
    failed = refusal(node.socket, hello(layout=msgspec.msgpack.encode([1, [*plain[1], ["twist", 1]]])))
    assert "twist" in failed.reason
    failed = refusal(node.socket, hello(layout=b"\xc1 nonsense"))
    assert failed.kind == "LayoutRefused"
    large = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 1000}))
    with pytest.raises(LimitReached, match="region_size"):
        Pool.connect(node.socket, large)


def test_another_layout_in_the_same_session(node: Node, cluster: Cluster) -> None:
    other = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 3}))
    with cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(LayoutRefused, match="'layers' is 3"):
            Pool.connect(node.socket, other, session=pool.session)
        same_size = Layout(**(msgspec.structs.asdict(LAYOUT) | {"weights_digest": "11"}))
        with pytest.raises(LayoutRefused, match="'weights_digest' is '11'"):
            Pool.connect(node.socket, same_size, session=pool.session)
        with pytest.raises(LimitReached, match="session 999999 does not exist"):
            Pool.connect(node.socket, LAYOUT, session=SessionId(999999))
        with pytest.raises(LayoutRefused):
            Pool.connect(node.socket, Layout(**(msgspec.structs.asdict(LAYOUT) | {"dtype": "int3"})))


def test_frames_that_are_too_large_or_out_of_order(node: Node) -> None:
    with Raw(node.socket) as raw:
        raw.write((1 << 31).to_bytes(4, "little") + b"x" * 64)
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert str(1 << 31) in failed.reason
        assert raw.closed()
    assert "must be Hello, not Match" in refusal(node.socket, engine.Match(1, b"", 0.1)).reason
    with Raw(node.socket) as raw:
        raw.send(hello())
        assert isinstance(raw.reply(), engine.Welcome)
        raw.send(hello(id=2))
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert "twice" in failed.reason
    with Raw(node.socket) as raw:
        raw.send(hello())
        raw.reply()
        raw.send(engine.Match(3, b"x" * 33, 0.1))
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert "33 bytes" in failed.reason


def test_leases_and_writes_of_others_are_out_of_reach(node: Node, cluster: Cluster) -> None:
    prompt = Prompt(77, 3)
    with cluster.connect(0, LAYOUT) as pool, Raw(node.socket) as raw:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        lease = pool.match(keys)
        write = pool.store(pool.prefix(Prompt(78, 2).tokens).keys)
        raw.send(hello())
        raw.reply()
        raw.send(engine.Release(((lease.id, 0, 3),)))
        raw.send(engine.Abort(write.id))
        raw.send(engine.Commit(2, write.id, (0, 1), 3, bytes(32)))
        committed = raw.reply()
        assert isinstance(committed, engine.Committed)
        assert outcomes(committed.codes) == {Code.EXPIRED}
        raw.send(engine.Fetch(3, lease.id, 0, 3, 0.1))
        fetched = raw.reply()
        assert isinstance(fetched, engine.Fetched)
        assert outcomes(fetched.codes) == {Code.LOST}
        raw.send(engine.Attach(4, lease.id))
        attached = raw.reply()
        assert isinstance(attached, engine.Matched)
        assert attached.hits == 0
        raw.send(engine.OpenRegion(5, 4_000_000_000))
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert "region 4000000000" in failed.reason
        arrays = lease.fetch()
        assert prompt.wrong(arrays) == 0
        for index, array in write.slots:
            Prompt(78, 2).fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        del arrays
        lease.release()


# -- noise, hundreds of times


def _noises(seed: int, first: list[bytes], frames: list[bytes]) -> Iterator[list[bytes]]:
    """What to write on one connection: random bytes, half frames, and valid frames in any order."""
    draw = random.Random(seed)
    for round_ in range(300):
        kind = round_ % 6
        if kind == 0:
            yield [draw.randbytes(draw.randrange(1, 3000))]
        elif kind == 1:
            frame = draw.choice(first + frames)
            yield [frame[: draw.randrange(len(frame))]]
        elif kind == 2:
            yield draw.choices(frames, k=draw.randrange(1, 6))
        elif kind == 3:
            yield [draw.choice(first), *draw.choices(frames, k=draw.randrange(1, 6))]
        elif kind == 4:
            body = draw.randbytes(draw.randrange(1, 200))
            yield [draw.choice(first), len(body).to_bytes(4, "little") + body]
        else:
            flipped = bytearray(draw.choice(frames))
            flipped[draw.randrange(4, len(flipped))] ^= 1 << draw.randrange(8)
            yield [draw.choice(first), bytes(flipped), draw.choice(frames)]


class Growth:
    """Descriptors, threads and private memory of a daemon, before and after."""

    def __init__(self, node: Node) -> None:
        assert node.process is not None
        self.pid = node.process.pid
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
    """`begin`: how a fifth of the connections begin, so that the rest of them is noise from somebody believed."""
    for number, parts in enumerate(writes):
        with Raw(address) as raw:
            if begin is not None and number % 5 == 4:
                begin(raw)
            for part in parts:
                raw.write(part)


def engine_frames() -> tuple[list[bytes], list[bytes]]:
    keys = bytes(range(32)) * 3
    messages: list[msgspec.Struct] = [
        engine.Match(1, keys, 0.01),
        engine.Attach(2, 7),
        engine.Fetch(3, 9, 0, 4_000_000_000, 0.01),
        engine.Release(((1, 0, 4_000_000_000), (2, 5, 1))),
        engine.Prepare(4, keys, 4_294_967_295),
        engine.Prepare(4, keys, 0),
        engine.Commit(5, 1, (0, 1, 2, 0), 255, b"x"),
        engine.Abort(1),
        engine.Heartbeat(6),
        engine.OpenRegion(7, 0, True),
        engine.OpenRegion(8, 99),
        engine.Bye(),
        engine.Welcome(1, 1, "x", 1, 1, 1, "t", b"", b"", 1.0, 1),
    ]
    first = [pack_frame(hello()), pack_frame(hello(session=5)), pack_frame(hello(resume=1))]
    return first, [pack_frame(message) for message in messages]


def peer_frames() -> tuple[list[bytes], list[bytes]]:
    keys = bytes(range(32)) * 2
    messages: list[msgspec.Struct] = [
        peer.Lookup(1, "default", keys),
        peer.LookupReply(1, 1, b"\7\7", ("nobody",), (0.5, 1.0)),
        peer.ReleaseLease((1, 2, 3)),
        peer.Announce("default", keys, 1.0),
        peer.Ready(2, "default", keys),
        peer.Pong(3, (0.5, 1.0)),
        peer.Ping(4, (0.5, 1.0)),
        peer.Pull("default", keys),
        peer.Offer(5, "default", keys, (0, 1), LAYOUT.segment_bytes, LAYOUT.shards),
        peer.Redundant("default", keys, ("nobody",)),
        peer.Evicted("default", keys[:31], "nobody"),
        peer.Touched("nobody", keys),
        peer.Advertised(),
    ]
    first = [
        pack_frame(peer.PeerHello(1, 1, "stranger", 1, False, bytes(32))),
        pack_frame(peer.PeerHello(1, 1, "node1", 1, True, bytes(32))),
        pack_frame(peer.PeerChallenge(1, "node1", 1, bytes(32), bytes(32))),
        pack_frame(peer.PeerProof(1, ("node0", "node1"), bytes(32))),
        pack_frame(peer.PeerWelcome()),
    ]
    return first, [pack_frame(message) for message in messages]


def test_noise_on_the_local_socket(node: Node) -> None:
    noise_from_a_process(node.socket, seed=1)  # What grows once has grown.
    growth = Growth(node)
    noise_from_a_process(node.socket, seed=2)
    growth.check()
    assert total(node, "tokenlake_processes") == 0
    assert total(node, "tokenlake_quarantined_slots") == 0


def noise_from_a_process(path: Path, seed: int) -> None:
    """From a process that ends: what was mapped to a living one is not given back."""
    script = (
        "from pathlib import Path; from tests.server.test_refusals import _noises, engine_frames, make_noise; "
        f"make_noise(Path({str(path)!r}), _noises({seed}, *engine_frames()))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_S, cwd=Path(__file__).parents[2])


def test_connections_that_map_nothing_leave_nothing(node: Node) -> None:
    growth = Growth(node)
    for _ in range(100):
        with Raw(node.socket) as raw:
            raw.send(hello())
            assert isinstance(raw.reply(), engine.Welcome)
            raw.send(engine.Prepare(2, bytes(range(32)), 0))
            raw.reply()
    growth.check()
    assert total(node, "tokenlake_processes") == 0
    assert total(node, "tokenlake_quarantined_slots") == 0


def test_noise_on_the_peers_port(node: Node, cluster: Cluster) -> None:
    frames = peer_frames()
    address = peer_address(node)
    posing = identity_of(cluster.nodes[1])

    def begin(raw: Raw) -> None:
        """A peer of the right name and secret on a bulk connection is served, what it says there is not."""
        assert isinstance(introduce(raw, posing, "node0", bulk=True), peer.PeerWelcome)

    make_noise(address, _noises(3, *frames), begin)
    growth = Growth(node)
    make_noise(address, _noises(4, *frames), begin)
    growth.check()
    wait_until(lambda: total(node, "tokenlake_peers_connected") == 1, "the real peer is still there")


def test_connections_that_say_nothing_are_bounded(node: Node) -> None:
    address = peer_address(node)
    growth = Growth(node)
    silent = [Raw(address) for _ in range(200)]
    refused = [raw for raw in silent[100:] if raw.closed()]
    assert len(refused) == 100
    assert node.page("/health")
    for raw in silent:
        raw.sock.close()
    growth.check()


# -- limits, tenants, names


def test_sessions_and_processes_are_limited(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text("max_sessions = 2\n")
    with daemons(config=str(file)) as cluster:
        node = cluster.nodes[0]
        first, second = cluster.connect(0, LAYOUT), cluster.connect(0, LAYOUT)
        with pytest.raises(LimitReached, match="'max_sessions' of 2"):
            Pool.connect(node.socket, LAYOUT)
        ranks = [Pool.connect(node.socket, LAYOUT, session=first.session) for _ in range(30)]
        with pytest.raises(LimitReached, match="32 processes"):
            Pool.connect(node.socket, LAYOUT, session=first.session)
        for rank in ranks:
            rank.close()
        second.close()
        wait_until(lambda: total(node, "tokenlake_processes") == 1, "they left")
        Pool.connect(node.socket, LAYOUT).close()
        first.close()


TENANTS = """
allow_uids = [{uid}]

[[tenants]]
name = "red"
secret = "{red}"
tokens = ["red-token-0123456789"]

[[tenants]]
name = "blue"
secret = "{blue}"
tokens = ["blue-token-0123456789"]
"""


def test_tenants_are_strangers_to_each_other(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text(TENANTS.format(uid=os.getuid(), red="aa" * 32, blue="bb" * 32))
    prompt = Prompt(80, 5)
    with daemons(config=str(file)) as cluster:
        path = cluster.nodes[0].socket
        for token in (None, "no-token", "red-token-012345678", ""):
            with pytest.raises(CredentialRefused) as refused:
                Pool.connect(path, LAYOUT, token)
            assert not token or token not in str(refused.value)
        red, blue = (Pool.connect(path, LAYOUT, f"{name}-token-0123456789") for name in ("red", "blue"))
        with red, blue:
            assert (red.tenant, blue.tenant) == ("red", "blue")
            store(red, prompt)
            keys = red.prefix(prompt.tokens).keys
            assert not set(keys) & set(blue.prefix(prompt.tokens).keys)
            with blue.match(keys) as lease:
                assert lease.hits == 0, "not even by the other's keys"
            assert outcomes(store(blue, prompt)) == {Code.COMMITTED}
            assert read(red, prompt) == read(blue, prompt) == 5
            regions = {place for place, _ in red._link.regions._mapped}
            assert regions
            for region in regions:
                for write in (False, True):
                    with pytest.raises(CredentialRefused, match=f"region {region} "):
                        blue._link._open_region(region, write)
            with pytest.raises(Refused, match="another tenant"):
                Pool.connect(path, LAYOUT, "blue-token-0123456789", session=red.session)


CONNECT_AS_NOBODY = """
import os, sys
from tests.robustness.live import LAYOUT
from tokenlake_client import Pool
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Pool.connect(sys.argv[1], LAYOUT)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_uid_that_is_not_allowed() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.socket.chmod(0o666)
        cluster.directory.chmod(0o755)
        ended = subprocess.run(
            [sys.executable, "-c", CONNECT_AS_NOBODY, str(node.socket)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert "CredentialRefused uid 65534 may not use this daemon" in ended.stdout, ended


def test_rings_that_differ_are_named_on_both_sides() -> None:
    ports = {name: free_port() for name in ("a", "b", "c")}
    both = f"a=127.0.0.1:{ports['a']},b=127.0.0.1:{ports['b']}"
    all_three = f"{both},c=127.0.0.1:{ports['c']}"
    with daemons() as cluster:
        one = _node(cluster, "a", ports["a"], both)
        two = _node(cluster, "b", ports["b"], all_three)
        for node in (one, two):
            node.start()
        for node in (one, two):
            _until_logged(node, lambda text: "its members are" in text and "a, b, c" in text and "'peers'" in text)
        for node in (one, two):
            assert node.page("/health")
            assert total(node, "tokenlake_peers_connected") == 0
            assert node.stop() == 0


def test_two_nodes_of_one_name() -> None:
    ports = {name: free_port() for name in ("a", "b", "again")}
    with daemons() as cluster:
        one = _node(cluster, "a", ports["a"], f"b=127.0.0.1:{ports['b']}")
        two = _node(cluster, "b", ports["b"], f"a=127.0.0.1:{ports['a']}")
        for node in (one, two):
            node.start()
        wait_until(lambda: _connected(two), "the two nodes know each other")
        again = _node(cluster, "a", ports["again"], f"b=127.0.0.1:{ports['b']}")
        again.socket = cluster.directory / "again.sock"
        again._settings["socket"] = str(again.socket)
        again.log = cluster.directory / "again.log"
        again.start()
        _until_logged(one, lambda text: "two daemons are called 'a'" in text)
        _until_logged(two, lambda text: "two daemons are called 'a'" in text)
        wait_until(lambda: _connected(two), "one of them is connected")
        for node in (one, two, again):
            assert node.stop() == 0


def _connected(node: Node) -> bool:
    try:
        return total(node, "tokenlake_peers_connected") == 1
    except OSError:
        return False


def _node(cluster: Cluster, name: str, port: int, peers: str) -> Node:
    settings = {"memory": "1MiB", "listen": f"127.0.0.1:{port}", "peers": peers}
    node = Node(name, cluster.directory, settings)
    cluster.nodes.append(node)
    return node


def _until_logged(node: Node, found: Callable[[str], bool]) -> None:
    wait_until(lambda: node.log.exists() and found(node.log.read_text()), f"the log of {node.name} says so")
