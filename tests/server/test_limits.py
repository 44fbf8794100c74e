"""Limits: a resource that runs out affects only the requests that need it."""

from __future__ import annotations

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
    PATIENT_S,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_until,
)
from tests.server.raw import Raw, hello
from tokenlake.errors import LimitReached
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import NodeId
from tokenlake.layout import Layout
from tokenlake.ring import Ring
from tokenlake.wire import Code, engine, pack_frame
from tokenlake_server.engine_connection import MAX_IN_FLIGHT, MAX_KEYS
from tokenlake_server.metrics_page import MAX_THREADS
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

WIDE = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 5}))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def regions_mapped(node: Node) -> int:
    """Regions that the daemon maps."""
    assert node.process is not None
    maps = Path(f"/proc/{node.process.pid}/maps").read_text().splitlines()
    return sum("/memfd:tokenlake-" in line for line in maps)


def limit_memory(node: Node, nbytes: int) -> None:
    """Let the daemon map so many bytes in total."""
    assert node.process is not None
    resource.prlimit(node.process.pid, resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))


def test_a_region_is_replaced_once_there_is_memory() -> None:
    """The daemon gives back the memory of the old layout and cannot get new memory: the arena is smaller than `memory`,
    never larger. The new layout gets its region as soon as there is memory."""
    with daemons(1, "1MiB", "1MiB") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as former:
            store(former, Prompt(1, 4))
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "stored")
        assert regions_mapped(node) == 1
        limit_memory(node, 1)
        with cluster.connect(0, WIDE) as newcomer:
            prompt = Prompt(2, 2)
            keys = newcomer.prefix(prompt.tokens).keys
            wait_until(lambda: "could not be replaced" in node.log.read_text(), "it says so")
            assert regions_mapped(node) == 0, "the old memory is given back first"
            assert outcomes(bytes(newcomer.store(keys).codes)) == {Code.NO_REGION}
            limit_memory(node, resource.RLIM_INFINITY)
            wait_until(lambda: total(node, "tokenlake_slots") > 0, "it tried again")
            assert regions_mapped(node) == 1
            assert outcomes(newcomer.store_all(keys, lambda at, array: array.fill(at + 1), patience=LIMIT_S)) == {
                Code.COMMITTED
            }
            with newcomer.match(keys, deadline_s=PATIENT_S) as lease:
                assert [bytes(array) for array in lease.fetch()] == [bytes([at]) * WIDE.segment_bytes for at in (1, 2)]
        assert node.log.read_text().count("could not be replaced") == 1


def test_a_tenant_cannot_end_the_daemon_through_its_region(cluster: Cluster) -> None:
    """A daemon that accesses a page beyond the end of a file gets SIGBUS, so no tenant may make a region smaller. A
    tenant may give pages back; the daemon then reads zeros."""
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, Prompt(1, 20))
        pending = pool.link.channel.begin(lambda number: engine.OpenRegion(number, 0, write=True))
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


def test_a_full_disk_ends_only_the_event_log() -> None:
    with daemons(record="/dev/full") as cluster, cluster.connect(0, LAYOUT) as pool:
        node = cluster.nodes[0]
        draw = random.Random(1)
        keys = [draw.randbytes(32) for _ in range(512)]

        def logged() -> bool:
            pool.match(keys, deadline_s=PATIENT_S).release()  # type: ignore[arg-type]
            return "the event log ends" in node.log.read_text()

        wait_until(logged, "more than its buffer was recorded")
        assert outcomes(store(pool, Prompt(3, 4))) == {Code.COMMITTED}
        assert read(pool, Prompt(3, 4)) == 4
        assert node.log.read_text().count("the event log ends") == 1
        assert "Traceback" not in node.log.read_text()
        pool.close()
        assert node.stop() == 0


def test_requests_in_flight_are_bounded() -> None:
    """Matches that wait for a frozen node: those above the limit are refused, and the connection stays open."""
    beyond = 40
    with daemons(2, suspect_ms="20000") as cluster:
        node = cluster.nodes[0]
        with Raw(node.socket) as raw:
            raw.send(hello())
            assert isinstance(raw.reply(), engine.Welcome)
            cluster.nodes[1].freeze()
            draw = random.Random(2)
            count = MAX_IN_FLIGHT + beyond
            # The frozen node is the directory node of each key, so that every match waits for it.
            ring = Ring({NodeId(each.name): 1 for each in cluster.nodes})
            drawn = (draw.randbytes(32) for _ in itertools.count())
            keys = (key for key in drawn if ring.candidates(key)[0][0] == cluster.nodes[1].name)
            raw.write(b"".join(pack_frame(engine.Match(at, next(keys), 2.0)) for at in range(2, 2 + count)))
            # A hint has no reply, so that the bound on requests in flight does not apply.
            raw.send(engine.Hint(bytes(32), Hints(Outlook.OVER)))
            replies = [raw.reply() for _ in range(count)]
            cluster.nodes[1].thaw()
            refused = [reply for reply in replies if isinstance(reply, engine.Failed)]
            assert len(refused) == beyond
            assert {reply.kind for reply in refused} == {LimitReached.__name__}
            assert "'max_in_flight'" in refused[0].reason
            raw.send(engine.Heartbeat(1))
            assert raw.reply() == engine.HeartbeatReply(1, True)


def test_keys_per_request_are_bounded(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(Prompt(4, 1).tokens).keys * (MAX_KEYS + 1)
        for ask in (pool.match, pool.store):
            with pytest.raises(LimitReached, match="'max_keys' is 65536"):
                ask(keys)
        assert pool.match(keys[:10], deadline_s=PATIENT_S).hits == 0


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


def test_entries_of_each_map_are_gauges(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, Prompt(5, 2))
        lease = match(pool, Prompt(5, 2))
        seen = node.metrics()
        assert seen['tokenlake_map_entries{map="sessions"}'] == 1
        assert seen['tokenlake_map_entries{map="leases"}'] == 1
        lease.release()
        wait_until(lambda: node.metrics()['tokenlake_map_entries{map="leases"}'] == 0, "given back")
