"""Prompts of more segments than one request of the daemon names."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.connections import ScriptedDaemon, scripted_link
from tests.robustness.live import LIMIT_S, PATIENT, PATIENT_S, daemons, wait_told, wait_until
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake_client import Pool
from tokenlake_client.grants import Grants
from tokenlake_client.match import DEFAULT_MATCH, PendingMatch
from tokenlake_client.pool_state import PoolState
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

TINY = Layout(
    model_id="tiny",
    weights_digest="00",
    dtype="float32",
    layers=1,
    kv_heads=1,
    key_dim=8,
    value_dim=8,
    position="rope",
    segment_tokens=1,
)
"""A segment of one token takes 64 bytes."""
SEGMENTS = 1_000_000 // 256
"""The full segments of a prompt of a million tokens, with the default `segment_tokens`."""
SECOND = MAX_KEYS + 500
"""A segment of the second request."""


def content(key: SegmentKey) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(key).digest(TINY.segment_bytes), np.uint8)


def wrong(arrays: Sequence[NDArray[np.uint8]], keys: Sequence[SegmentKey]) -> int:
    """The number of arrays with wrong content."""
    return sum(not np.array_equal(array, content(key)) for array, key in zip(arrays, keys, strict=True))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2, "8MiB", "2MiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> Sequence[SegmentKey]:
    """The keys of a prompt that is stored at the first node."""
    with cluster.connect(0, TINY) as pool:
        keys = pool.prefix(range(SEGMENTS)).keys
        codes = pool.store_all(keys, lambda index, slot: np.copyto(slot, content(keys[index])), patience=LIMIT_S)
        assert codes.count(Code.COMMITTED) == SEGMENTS
        wait_told(cluster)
        return keys


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_all_segments_of_a_long_prompt_are_found(
    cluster: Cluster, keys: Sequence[SegmentKey], node: int, verify: bool
) -> None:
    with Pool.connect(cluster.nodes[node].socket, TINY, verify=verify, deadlines=PATIENT) as pool:
        with pool.match(keys, deadline_s=PATIENT_S) as lease:
            assert (lease.hits, len(lease.codes), len(lease.keys)) == (SEGMENTS, SEGMENTS, SEGMENTS)
            assert lease.nodes().count(cluster.nodes[0].name) >= SEGMENTS - lease.local_hits
            lease.hint(Hints(Outlook.GOES_ON))
            # A range across the border of two parts, and then all.
            arrays = lease.fetch(MAX_KEYS - 10, MAX_KEYS + 10, deadline_s=LIMIT_S)
            assert wrong(arrays, keys[MAX_KEYS - 10 : MAX_KEYS + 10]) == 0
            lease.release(SECOND)
            whole = lease.fetch(deadline_s=LIMIT_S)
            assert wrong(whole, keys[:SECOND]) == 0
            copies = [np.zeros(TINY.segment_bytes, np.uint8) for _ in range(20)]
            assert lease.copy_into(copies, MAX_KEYS - 10, deadline_s=LIMIT_S) == 20
            assert wrong(copies, keys[MAX_KEYS - 10 : MAX_KEYS + 10]) == 0
        del arrays, whole
        pool.match([], deadline_s=PATIENT_S).release()
        leases = 'tokenlake_map_entries{map="leases"}'
        wait_until(lambda: cluster.nodes[node].metrics()[leases] == 0, "all parts are given back")


def test_a_match_ends_at_the_first_missing_segment(cluster: Cluster, keys: Sequence[SegmentKey]) -> None:
    with cluster.connect(0, TINY) as pool:
        other = pool.prefix(range(5, 5 + SEGMENTS)).keys
        for hits in (0, 10, MAX_KEYS, SECOND, 2 * MAX_KEYS):
            with pool.match([*keys[:hits], *other[hits:]], deadline_s=PATIENT_S) as lease:
                assert lease.hits == hits
                assert lease.codes == bytes([Code.LOCAL]) * hits + bytes([Code.MISSING]) * (SEGMENTS - hits)
                assert wrong(lease.fetch(), keys[:hits]) == 0


def test_a_long_match_is_polled(cluster: Cluster, keys: Sequence[SegmentKey]) -> None:
    """Another process of the session reads the lease."""
    with (
        cluster.connect(0, TINY) as pool,
        Pool.connect(cluster.nodes[0].socket, TINY, session=pool.engine.session, deadlines=PATIENT) as rank,
    ):
        pending = pool.engine.begin_match(keys, deadline_s=PATIENT_S)
        wait_until(lambda: pending.poll() is not None, "the last answer")
        lease = pending.wait()
        assert pending.answers == len(lease.ids) == -(-SEGMENTS // MAX_KEYS)
        nodes = lease.begin_nodes()
        wait_until(lambda: nodes.poll() is not None, "the nodes")
        assert nodes.poll() == [cluster.nodes[0].name] * SEGMENTS
        attached = rank.engine.attach(*lease.ids)
        lease.release()
        assert attached.hits == SEGMENTS
        assert wrong(attached.fetch(SECOND), keys[SECOND:]) == 0
        attached.release()
        dropped = pool.engine.begin_match(keys, deadline_s=PATIENT_S)
        wait_until(lambda: dropped.poll() is not None or dropped.answers > 1, "two answers")
        dropped.cancel()
        pool.match([], deadline_s=PATIENT_S).release()
        leases = 'tokenlake_map_entries{map="leases"}'
        wait_until(lambda: cluster.nodes[0].metrics()[leases] == 0, "all parts are given back")


def test_a_store_of_too_many_segments_reserves_the_first(cluster: Cluster) -> None:
    with cluster.connect(0, TINY) as pool:
        keys = pool.prefix(range(7, 7 + SEGMENTS)).keys
        with pool.store(keys) as write:
            assert len(write.codes) == SEGMENTS
            granted = write.codes.count(Code.RESERVED)
            assert 0 < granted == len(write.slots)
            assert set(write.codes[granted:]) == {Code.SESSION_LIMIT}
            for index, slot in write.slots:
                slot[:] = content(keys[index])
        with pool.match(keys, deadline_s=PATIENT_S) as lease:
            assert lease.hits == granted
            assert wrong(lease.fetch(), keys[:granted]) == 0
        reserved = pool.engine.reserve(keys[1:])
        assert len(reserved.codes) == SEGMENTS - 1
        reserved.release()


def answer_first(daemon: ScriptedDaemon, stop: threading.Event) -> None:
    """Answer the first match of each prompt as a whole hit, and no other."""
    answered = False
    while not stop.wait(0.001):
        for message in daemon.received():
            if isinstance(message, engine.Match) and not answered:
                answered = True
                codes = bytes([Code.LOCAL]) * MAX_KEYS
                daemon.send(engine.Matched(message.id, 7, MAX_KEYS, codes, bytes(SLOT_BYTES * MAX_KEYS), b""))


def test_all_requests_of_a_match_share_its_deadline() -> None:
    """The daemon answers the first request and then no other: the match returns the segments of the first."""
    deadline_s = 1.0
    stop = threading.Event()
    with scripted_link() as (link, daemon):
        thread = threading.Thread(target=answer_first, args=(daemon, stop))
        thread.start()
        state = PoolState(Grants(link), TINY, PATIENT, verify=False)
        keys = [SegmentKey(number.to_bytes(32, "big")) for number in range(4 * MAX_KEYS)]
        lease = PendingMatch(state, keys, "r", DEFAULT_MATCH, deadline_s).wait()
        stop.set()
        thread.join()
        assert (lease.hits, len(lease.codes)) == (MAX_KEYS, len(keys))
        lease.release()
        assert link.channel.timeouts == 1
