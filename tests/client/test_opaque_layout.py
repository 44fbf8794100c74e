"""Pools with an opaque layout: independent keys at several nodes, two ranks that fill one segment, and refusals."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.connections import scripted_link
from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, PATIENT_S, daemons, wait_told, wait_until
from tokenlake.errors import LayoutRefused, ProtocolRefused
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code, engine
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake_client import MatchOptions, Pool
from tokenlake_client.grants import Grants
from tokenlake_client.match import PendingMatch
from tokenlake_client.pool_state import PoolState
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

OPAQUE = OpaqueLayout(
    model_id="tiny-hybrid",
    weights_digest="00",
    engine="vllm 0.32.0",
    cache="two groups of 32 bytes on two ranks",
    shards=2,
    shard_bytes=32,
    segment_tokens=1,
)
INDEPENDENT = MatchOptions(independent=True)
SEGMENTS = 3000
NODES = 3
BORDER = 3 * MAX_KEYS // 4
"""The number of leased segments in the first request of a match: each fourth key has no segment."""


def content(key: SegmentKey) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(key).digest(OPAQUE.segment_bytes), np.uint8)


def wrong(arrays: Sequence[NDArray[np.uint8]], keys: Sequence[SegmentKey]) -> int:
    """The number of arrays with wrong content."""
    return sum(not np.array_equal(array, content(key)) for array, key in zip(arrays, keys, strict=True))


def engine_keys(name: str, count: int = SEGMENTS) -> list[tuple[int, bytes]]:
    """The engine's names of segments of two groups."""
    return [(at % 2, hashlib.sha256(f"{name} {at // 2}".encode()).digest()) for at in range(count)]


def store(pool: Pool, keys: Sequence[SegmentKey]) -> None:
    codes = pool.store_all(keys, lambda index, slot: np.copyto(slot, content(keys[index])), patience=LIMIT_S)
    assert set(codes) == {Code.COMMITTED}


def join(cluster: Cluster, node: int, *, session: Pool | None = None, verify: bool = False) -> Pool:
    number = None if session is None else session.engine.session
    socket = cluster.nodes[node].socket
    return Pool.connect(socket, OPAQUE, session=number, verify=verify, deadlines=PATIENT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(NODES, "8MiB", "2MiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> list[SegmentKey]:
    """Keys of segments that are spread over the nodes; each fourth has none."""
    keys: list[SegmentKey] = []
    for node in range(NODES):
        with join(cluster, node) as pool:
            keys = pool.opaque_keys(engine_keys("spread"))
            store(pool, keys[node::4])
    wait_told(cluster)
    return keys


@pytest.fixture(scope="module")
def stored(keys: list[SegmentKey]) -> list[SegmentKey]:
    return [key for index, key in enumerate(keys) if index % 4 < NODES]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("node", [0, 2])
def test_independent_keys_of_three_nodes(
    cluster: Cluster, keys: list[SegmentKey], stored: list[SegmentKey], node: int, verify: bool
) -> None:
    """More keys than one request of the daemon names, with holes between them."""
    with join(cluster, node, verify=verify) as pool:
        with pool.match(keys, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert list(lease.keys) == stored
            assert lease.hits == len(stored)
            holes = [code for index, code in enumerate(lease.codes) if index % 4 == NODES]
            assert set(holes) == {Code.MISSING}
            assert len(lease.codes) == SEGMENTS
            names = lease.nodes()
            assert len(names) == len(stored)
            assert set(names) == {each.name for each in cluster.nodes}
            # A range across the border of two parts, and then all.
            arrays = lease.fetch(BORDER - 10, BORDER + 10, deadline_s=LIMIT_S)
            assert wrong(arrays, stored[BORDER - 10 : BORDER + 10]) == 0
            lease.release(BORDER + 100)
            whole = lease.fetch(deadline_s=LIMIT_S)
            assert wrong(whole, stored[: BORDER + 100]) == 0
            copies = [np.zeros(OPAQUE.segment_bytes, np.uint8) for _ in range(20)]
            assert lease.copy_into(copies, BORDER - 10, deadline_s=LIMIT_S) == 20
            assert wrong(copies, stored[BORDER - 10 : BORDER + 10]) == 0
        del arrays, whole
        pool.match([], deadline_s=PATIENT_S).release()
        leases = 'tokenlake_map_entries{map="leases"}'
        wait_until(lambda: cluster.nodes[node].metrics()[leases] == 0, "all parts are given back")


def test_a_prefix_match_of_the_same_keys_ends_at_the_first_hole(cluster: Cluster, keys: list[SegmentKey]) -> None:
    with join(cluster, 0) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:
        assert lease.hits == NODES


def test_requests_without_a_hit_have_no_part_in_the_lease(
    cluster: Cluster, keys: list[SegmentKey], stored: list[SegmentKey]
) -> None:
    with join(cluster, 0) as pool:
        other = pool.opaque_keys(engine_keys("not stored"))
        asked = [*other[:MAX_KEYS], *keys[:MAX_KEYS], *other[MAX_KEYS : 2 * MAX_KEYS], *keys[MAX_KEYS:]]
        with pool.match(asked, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert list(lease.keys) == stored
            assert len(lease.ids) == 3
            assert all(lease.ids)
            assert lease.codes.count(Code.MISSING) == len(asked) - len(stored)
            assert wrong(lease.fetch(deadline_s=LIMIT_S), stored) == 0
        with pool.match(other, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert (lease.hits, lease.keys, lease.codes) == (0, [], bytes([Code.MISSING]) * SEGMENTS)
            assert lease.fetch() == []


def test_another_process_attaches_to_all_parts(
    cluster: Cluster, keys: list[SegmentKey], stored: list[SegmentKey]
) -> None:
    with join(cluster, 1) as pool, join(cluster, 1, session=pool, verify=True) as rank:
        pending = pool.engine.begin_match(keys, INDEPENDENT, deadline_s=PATIENT_S)
        wait_until(lambda: pending.poll() is not None, "the last answer")
        lease = pending.wait()
        attached = rank.engine.attach(*lease.ids)
        lease.release()
        assert attached.hits == len(stored)
        assert wrong(attached.fetch(BORDER - 5, deadline_s=LIMIT_S), stored[BORDER - 5 :]) == 0
        attached.release()


def test_an_attached_lease_ends_before_a_part_that_has_ended(cluster: Cluster, keys: list[SegmentKey]) -> None:
    """The segments of later parts would have other indices than in the process that matched."""
    with (
        join(cluster, 1) as pool,
        join(cluster, 1, session=pool) as rank,
        pool.match(keys, INDEPENDENT, deadline_s=PATIENT_S) as lease,
    ):
        first, _, last = lease.ids
        attached = rank.engine.attach(first, LeaseId(1 << 40), last)
        assert attached.hits == BORDER
        attached.release()


def test_segments_behind_lost_ones_are_fetched() -> None:
    """A node dies between the match and the fetch. A call returns the segments before the first lost one."""
    with daemons(2, "8MiB", "2MiB") as cluster, join(cluster, 0) as pool:
        keys = pool.opaque_keys(engine_keys("lost", 40))
        with join(cluster, 1) as other:
            store(other, keys[10:14] + keys[30:31])
        store(pool, keys[:10] + keys[14:30] + keys[31:])
        wait_told(cluster)
        with pool.match(keys, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert lease.hits == 40
            cluster.nodes[1].kill()
            read: dict[SegmentKey, NDArray[np.uint8]] = {}
            at = 0
            while at < lease.hits:
                arrays = lease.fetch(at, deadline_s=PATIENT_S)
                read.update(zip(lease.keys[at:], arrays, strict=False))
                at += len(arrays) + 1
            assert list(read) == keys[:10] + keys[14:30] + keys[31:]
            assert wrong(list(read.values()), list(read)) == 0


def test_a_session_has_one_layout(cluster: Cluster) -> None:
    """The first field that differs is named, also where the other process's layout is not opaque."""
    with join(cluster, 0) as pool:
        other = msgspec.structs.replace(OPAQUE, engine="vllm 0.33.0")
        for layout, named in ((other, "'engine' is 'vllm 0.33.0'"), (LAYOUT, "'model_id'")):
            with pytest.raises(LayoutRefused, match=named):
                Pool.connect(cluster.nodes[0].socket, layout, session=pool.engine.session, deadlines=PATIENT)


def test_attention_in_place_refuses_an_opaque_layout(cluster: Cluster, keys: list[SegmentKey]) -> None:
    refused = r"opaque: only its 'engine' 'vllm 0.32.0'"
    with join(cluster, 0) as pool, pool.match(keys, INDEPENDENT, deadline_s=PATIENT_S) as lease:
        with pytest.raises(LayoutRefused, match=refused):
            pool.queries.open_view(lease, 1, 1.0)
        with pytest.raises(LayoutRefused, match=refused):
            pool.engine.init_transfer([(keys, 0)])
        with pytest.raises(LayoutRefused, match=refused):
            assert pool.layout
        with pytest.raises(LayoutRefused, match=refused):
            pool.link.call(engine.OpenQuery, engine.QueryOpened)
        assert lease.hits


def test_a_lease_of_more_segments_than_the_codes_say_is_refused() -> None:
    with scripted_link() as (link, daemon):
        state = PoolState(Grants(link), OPAQUE, PATIENT, verify=False)
        pending = PendingMatch(state, [SegmentKey(bytes(32))] * 2, "r", INDEPENDENT, PATIENT_S)
        number = next(message.id for message in daemon.received() if isinstance(message, engine.Match))
        codes = bytes([Code.MISSING, Code.LOCAL])
        daemon.send(engine.Matched(number, 7, 2, codes, bytes(2 * SLOT_BYTES), b""))
        with pytest.raises(ProtocolRefused, match="leased 2 segments; its codes say 1"):
            pending.wait()
