"""Limits: a resource that runs out affects only the requests that need it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    PATIENT_S,
    Prompt,
    daemons,
    match,
    outcomes,
    pid_of,
    store,
    total,
    wait_until,
)
from tests.server.raw import Raw, hello
from tests.server.scene import tenants
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import LimitReached
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import SessionId
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine, pack_frame
from tokenlake.wire.engine import MAX_KEYS, MAX_RANGES
from tokenlake_client import Pool
from tokenlake_server.engines.connection import HELLO_BYTES, KEPT_PER_KEY, KEPT_PER_REQUEST, MAX_IN_FLIGHT
from tokenlake_server.engines.kept_bytes import MAX_OF_CONNECTION, Account, KeptBytes
from tokenlake_server.engines.listener import MAX_UNPROVEN, PROCESSES_PER_SESSION
from tokenlake_server.metrics_page import MAX_THREADS
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

WIDE = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 5}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def keys_at(cluster: Cluster, node: int) -> Iterator[bytes]:
    """Keys whose directory node is this one, without end."""
    ring, draw = Ring(RingRecord.of({each.name: 1 for each in cluster.nodes})), random.Random(2)
    drawn = (draw.randbytes(32) for _ in itertools.count())
    return (key for key in drawn if ring.candidates(key)[0][0] == cluster.nodes[node].name)


def regions_mapped(node: Node) -> int:
    """Regions that the daemon maps."""
    maps = Path(f"/proc/{pid_of(node)}/maps").read_text().splitlines()
    return sum("/memfd:tokenlake-" in line for line in maps)


def limit_regions(node: Node, nbytes: int) -> None:
    """Let the files of the daemon's regions have so many bytes each. A limit of its address space would take memory
    from the interpreter too."""
    resource.prlimit(pid_of(node), resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def test_a_region_is_replaced_once_there_is_memory() -> None:
    """The daemon gives back the memory of the old layout and cannot get new memory: the arena is smaller than `memory`,
    never larger. The new layout gets its region as soon as there is memory."""
    with daemons(1, "1MiB", "1MiB") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as former:
            store(former, Prompt(1, 4))
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "stored")
        assert regions_mapped(node) == 1
        limit_regions(node, 256 << 10)
        with cluster.connect(0, WIDE) as newcomer:
            prompt = Prompt(2, 2)
            keys = newcomer.prefix(prompt.tokens).keys
            wait_until(lambda: "memory for region" in node.log.read_text(), "it says so")
            assert regions_mapped(node) == 0, "the old memory is given back first"
            assert outcomes(bytes(newcomer.store(keys).codes)) == {Code.NO_REGION}
            limit_regions(node, resource.RLIM_INFINITY)
            wait_until(lambda: total(node, "tokenlake_slots") > 0, "it tried again")
            assert regions_mapped(node) == 1
            assert outcomes(newcomer.store_all(keys, lambda at, array: array.fill(at + 1), patience=LIMIT_S)) == {
                Code.COMMITTED
            }
            with newcomer.match(keys, deadline_s=PATIENT_S) as lease:
                assert [bytes(array) for array in lease.fetch()] == [bytes([at]) * WIDE.segment_bytes for at in (1, 2)]
        assert node.log.read_text().count("is missing, and is tried") == 1


def test_a_tenant_cannot_end_the_daemon_through_its_region(cluster: Cluster) -> None:
    """A daemon that accesses a page beyond the end of a file gets SIGBUS, so no tenant may make a region smaller. A
    tenant may give pages back; the daemon then reads zeros."""
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        prompt = Prompt(1, 20)
        store(pool, prompt)
        with match(pool, prompt) as lease:
            region = int(lease.places[0]["region"])
        pending = pool.link.channel.begin(lambda number: engine.OpenRegion(number, region, write=True))
        reply = pool.link.wait(pending)
        assert isinstance(reply, engine.Region)
        assert pending.descriptor is not None
        for size in (0, 4096, 2 * reply.region_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(pending.descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(pending.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        mapped = mmap.mmap(pending.descriptor, reply.region_bytes)
        mapped.madvise(mmap.MADV_REMOVE)
        mapped.close()
        os.close(pending.descriptor)
        assert outcomes(store(pool, Prompt(2, 40))) <= {Code.COMMITTED, Code.NOT_ADMITTED}
        assert node.running


@contextlib.contextmanager
def waiting() -> Iterator[tuple[Raw, Iterator[bytes]]]:
    """An engine of a daemon whose peer is frozen, and keys for which every match waits: their directory node is that
    peer."""
    with daemons(2, suspect_ms="20000") as cluster, Raw.joined(cluster.nodes[0].socket) as raw:
        cluster.nodes[1].freeze()
        try:
            yield raw, keys_at(cluster, 1)
        finally:
            cluster.nodes[1].thaw()
        raw.send(engine.Match(1, bytes(32), 0.1))
        assert isinstance(raw.reply(), engine.Matched), "as many matches may wait again"


def refusals(raw: Raw, count: int) -> list[engine.Failed]:
    """The refusals among so many replies."""
    replies = [raw.reply() for _ in range(count)]
    return [reply for reply in replies if isinstance(reply, engine.Failed)]


def test_requests_in_flight_are_bounded() -> None:
    """Those above the limit are refused, and the connection stays open."""
    beyond = 40
    with waiting() as (raw, keys):
        count = MAX_IN_FLIGHT + beyond
        raw.write(b"".join(pack_frame(engine.Match(at, next(keys), 2.0)) for at in range(2, 2 + count)))
        # A hint has no reply, so that the bound on requests in flight does not apply.
        raw.send(engine.Hint(bytes(32), Hints(Outlook.OVER)))
        refused = refusals(raw, count)
        assert len(refused) == beyond
        assert {reply.kind for reply in refused} == {LimitReached.__name__}
        assert "'max_in_flight'" in refused[0].reason


def test_waiting_matches_are_bounded_in_bytes() -> None:
    """Matches of as many keys as one may have."""
    with waiting() as (raw, some):
        keys, count = b"".join(itertools.islice(some, MAX_KEYS)), 100
        for number in range(2, 2 + count):
            raw.send(engine.Match(number, keys, 2.0))
        refused = refusals(raw, count)
        assert 0 < len(refused) < count
        assert "'connection_bytes'" in refused[0].reason
        waited = count - len(refused)
        assert waited * (KEPT_PER_REQUEST + KEPT_PER_KEY * MAX_KEYS) <= MAX_OF_CONNECTION


@pytest.mark.parametrize(
    ("message", "reason", "closed"),
    [
        # It once took seconds to decode.
        (engine.Release(((1, 0, 1),) * 100_000), f"length <= {MAX_RANGES}", True),
        (engine.Hint(bytes(32) * (MAX_KEYS + 1), Hints(Outlook.OVER)), "'max_changed' is 128", True),
        (engine.Match(2, bytes(32) * (MAX_KEYS + 1), 0.1), "'max_keys' is 1024", False),
    ],
    ids=["ranges", "keys of a hint", "keys of a match"],
)
def test_ranges_per_release_are_bounded(cluster: Cluster, message: msgspec.Struct, reason: str, closed: bool) -> None:
    """It closes the connection after a frame that has no reply."""
    with Raw.joined(cluster.nodes[0].socket) as raw:
        raw.write(pack_frame(message))
        assert reason in raw.failed().reason
        if closed:
            assert raw.closed()


def test_an_engine_with_unread_answers_opens_a_region() -> None:
    """The answers fill the socket's buffer, so that the descriptor has to wait. The daemon once closed
    the connection."""
    prompt = Prompt(8, 1)
    with (
        daemons(1, "16MiB", "16MiB") as cluster,
        cluster.connect(0, LAYOUT) as pool,
        Raw(cluster.nodes[0].socket) as raw,
    ):
        store(pool, prompt)
        raw.send(hello())
        raw.reply()
        # Each answer has a byte for each key.
        keys, matches = random.Random(8).randbytes(32 * MAX_KEYS), 400
        for number in range(2, 2 + matches):
            raw.send(engine.Match(number, keys, 0.1))
        raw.send(engine.OpenRegion(1000, 0))
        raw.send(engine.Heartbeat(1001))
        wait_until(lambda: cluster.nodes[0].metrics()["tokenlake_match_requests_total"] >= matches, "all are answered")
        received, descriptors = b"", list[int]()
        while len(descriptors) < 1:
            part, found, _, _ = socket.recv_fds(raw.sock, 1 << 16, 4)
            assert part, "the daemon closed the connection"
            received, descriptors = received + part, descriptors + found
        while not received.endswith(pack_frame(engine.HeartbeatReply(1001, True))):
            part = raw.sock.recv(1 << 16)
            assert part
            received += part
        assert len(received) > 256 << 10
        assert os.fstat(descriptors[0]).st_size >= 16 << 20
        os.close(descriptors[0])


def test_a_tenant_takes_its_part_of_the_sessions_only(tmp_path: Path) -> None:
    with daemons(config=tenants(tmp_path, "max_sessions = 10")) as cluster, contextlib.ExitStack() as pools:
        socket_ = cluster.nodes[0].socket

        def connect(name: str, session: SessionId | None = None) -> Pool:
            token = f"{name}-token-0123456789"
            return pools.enter_context(
                Pool.connect(socket_, LAYOUT, token, deadlines=PATIENT, session=session or SessionId(0))
            )

        red = [connect("red") for _ in range(5)]
        with pytest.raises(LimitReached, match="tenant 'red' has 5 sessions, its part of 'max_sessions' of 10"):
            connect("red")
        blue = [connect("blue") for _ in range(5)]
        with pytest.raises(LimitReached, match="'max_sessions' of 10 sessions"):
            connect("blue")
        for _ in range(10 * PROCESSES_PER_SESSION // 2 - 5):
            connect("red", red[0].engine.session)
        with pytest.raises(LimitReached, match="80 processes of tenant 'red' are connected, its part of 160"):
            connect("red", red[0].engine.session)
        connect("blue", blue[0].engine.session)


def test_connections_without_a_hello(cluster: Cluster) -> None:
    """Connections without a hello keep no engine out and little memory."""
    node = cluster.nodes[0]
    with contextlib.ExitStack() as silent:
        rows = [silent.enter_context(Raw(node.socket)) for _ in range(MAX_UNPROVEN + 6)]
        for raw in rows[:6]:
            failed = raw.failed()
            assert f"{MAX_UNPROVEN} newer connections" in failed.reason
        with cluster.connect(0, LAYOUT) as pool:
            assert outcomes(store(pool, Prompt(9, 1))) == {Code.COMMITTED}
            # The newest ones are still open, and one that says Hello is served.
            rows[-1].send(hello())
            assert isinstance(rows[-1].reply(), engine.Welcome)
    with Raw(node.socket) as raw:
        raw.write((HELLO_BYTES + 1).to_bytes(4, "little"))
        failed = raw.failed()
        assert f"at most {HELLO_BYTES}" in failed.reason
        assert raw.closed()


def test_requests_for_metrics_are_bounded(cluster: Cluster) -> None:
    """Connections without a request hold a thread each; above the limit they are closed at once."""
    node = cluster.nodes[0]
    address = ("127.0.0.1", node.metrics_port)
    silent = [socket.create_connection(address, LIMIT_S) for _ in range(MAX_THREADS)]
    with socket.create_connection(address, LIMIT_S) as beyond:
        assert beyond.recv(1) == b""
    for sock in silent:
        sock.close()

    def serves() -> bool:
        try:
            return 'tokenlake_map_entries{map="sessions"}' in node.page("/metrics")
        except OSError:
            return False

    wait_until(serves, "there is room again")


MIB = 1 << 20


def test_a_tenant_does_not_take_the_part_of_another() -> None:
    kept = KeptBytes(2, 4 * MIB)
    red = [Account(kept, "red") for _ in range(2)]
    red[0].charge(MIB)
    red[1].charge(MIB)
    with pytest.raises(LimitReached, match="tenant 'red'.*'tenant_bytes' is 2097152"):
        red[1].charge(1)
    blue = Account(kept, "blue")
    blue.charge(2 * MIB)
    assert (kept.of("red"), kept.of("blue")) == (2 * MIB, 2 * MIB), "what was refused is not counted"
    red[0].charge(-MIB)
    red[1].charge(MIB)
    for account in (*red, blue):
        account.close()
        account.close()
    assert (kept.of("red"), kept.of("blue")) == (0, 0)


def test_a_connection_has_a_limit() -> None:
    kept = KeptBytes(1, 4 * MAX_OF_CONNECTION)
    account = Account(kept, "red")
    account.charge(MAX_OF_CONNECTION)
    with pytest.raises(LimitReached, match="'connection_bytes'"):
        account.charge(1)
    Account(kept, "red").charge(1)
