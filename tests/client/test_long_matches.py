"""Matches of more keys than one request of the daemon names: of a long prompt, and of an opaque layout, whose keys are
independent and lie at several nodes; and what an opaque layout refuses."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.connections import ScriptedDaemon, scripted_link
from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, PATIENT_S, daemons, wait_told, wait_until
from tokenlake.errors import LayoutRefused, ProtocolRefused
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.opaque_layout import AnyLayout, OpaqueLayout
from tokenlake.wire import Code, engine
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake_client import MatchOptions, Pool
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
LONG = 1_000_000 // 256
"""The full segments of a prompt of a million tokens, with the default `segment_tokens`."""
SPREAD = 3000
NODES = 3
LEASES = 'tokenlake_map_entries{map="leases"}'


def content(key: SegmentKey) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_128(key).digest(TINY.segment_bytes), np.uint8)


def wrong(arrays: Sequence[NDArray[np.uint8]], keys: Sequence[SegmentKey]) -> int:
    """The number of arrays with wrong content."""
    return sum(not np.array_equal(array, content(key)) for array, key in zip(arrays, keys, strict=True))


def engine_keys(name: str, count: int = SPREAD) -> list[tuple[int, bytes]]:
    """The engine's names of segments of two groups."""
    return [(at % 2, hashlib.sha256(f"{name} {at // 2}".encode()).digest()) for at in range(count)]


def store(pool: Pool, keys: Sequence[SegmentKey]) -> None:
    codes = pool.store_all(keys, lambda index, slot: np.copyto(slot, content(keys[index])), patience=LIMIT_S)
    assert set(codes) == {Code.COMMITTED}


def join(
    cluster: Cluster, node: int, layout: AnyLayout = OPAQUE, *, session: Pool | None = None, verify: bool = False
) -> Pool:
    number = None if session is None else session.engine.session
    return Pool.connect(cluster.nodes[node].socket, layout, session=number, verify=verify, deadlines=PATIENT)


@dataclass(frozen=True)
class Stored:
    """Stored segments, and the keys that are asked for."""

    layout: AnyLayout
    options: MatchOptions
    asked: Sequence[SegmentKey]
    found: Sequence[SegmentKey]
    border: int
    """The number of leased segments in the first request of a match."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(NODES, "8MiB", "2MiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompt(cluster: Cluster) -> Stored:
    """A long prompt at the first node."""
    with cluster.connect(0, TINY) as pool:
        keys = pool.prefix(range(LONG)).keys
        store(pool, keys)
    wait_told(cluster)
    return Stored(TINY, DEFAULT_MATCH, keys, keys, MAX_KEYS)


@pytest.fixture(scope="module")
def spread(cluster: Cluster) -> Stored:
    """Independent segments that are spread over the nodes; each fourth key has none."""
    keys: list[SegmentKey] = []
    for node in range(NODES):
        with join(cluster, node) as pool:
            keys = pool.opaque_keys(engine_keys("spread"))
            store(pool, keys[node::4])
    wait_told(cluster)
    found = [key for index, key in enumerate(keys) if index % 4 < NODES]
    return Stored(OPAQUE, INDEPENDENT, keys, found, 3 * MAX_KEYS // 4)


@pytest.fixture(params=["prompt", "spread"])
def stored(request: pytest.FixtureRequest) -> Stored:
    made: Stored = request.getfixturevalue(request.param)
    return made


def all_given_back(cluster: Cluster, node: int, pool: Pool) -> None:
    """Wait until the node has no lease."""
    pool.match([], deadline_s=PATIENT_S).release()
    wait_until(lambda: cluster.nodes[node].metrics()[LEASES] == 0, "all parts are given back")


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("node", [0, 2])
def test_all_segments_are_found(cluster: Cluster, stored: Stored, node: int, verify: bool) -> None:
    border, keys = stored.border, stored.found
    with join(cluster, node, stored.layout, verify=verify) as pool:
        with pool.match(stored.asked, stored.options, deadline_s=PATIENT_S) as lease:
            assert list(lease.keys) == list(keys)
            there = set(keys)
            assert [code != Code.MISSING for code in lease.codes] == [key in there for key in stored.asked]
            assert len(lease.nodes()) == len(keys)
            lease.hint(Hints(Outlook.GOES_ON))
            # A range across the border of two parts, and then all.
            arrays = lease.fetch(border - 10, border + 10, deadline_s=LIMIT_S)
            assert wrong(arrays, keys[border - 10 : border + 10]) == 0
            lease.release(border + 100)
            whole = lease.fetch(deadline_s=LIMIT_S)
            assert wrong(whole, keys[: border + 100]) == 0
            copies = [np.zeros(TINY.segment_bytes, np.uint8) for _ in range(20)]
            assert lease.copy_into(copies, border - 10, deadline_s=LIMIT_S) == 20
            assert wrong(copies, keys[border - 10 : border + 10]) == 0
        del arrays, whole
        all_given_back(cluster, node, pool)


def test_a_match_is_polled_and_attached_to(cluster: Cluster, stored: Stored) -> None:
    """Another process reads the lease. An attached lease ends before a part that has ended: the segments of later parts
    would have other indices than in the process that matched."""
    count, layout = len(stored.found), stored.layout
    with join(cluster, 0, layout) as pool, join(cluster, 0, layout, session=pool, verify=True) as rank:
        pending = pool.engine.begin_match(stored.asked, stored.options, deadline_s=PATIENT_S)
        wait_until(lambda: pending.poll() is not None, "the last answer")
        lease = pending.wait()
        assert pending.answers == len(lease.ids) == -(-len(stored.asked) // MAX_KEYS)
        nodes = lease.begin_nodes()
        wait_until(lambda: nodes.poll() is not None, "the nodes")
        assert len(nodes.poll() or ()) == count
        cut = rank.engine.attach(lease.ids[0], LeaseId(1 << 40), *lease.ids[2:])
        assert cut.hits == stored.border
        cut.release()
        attached = rank.engine.attach(*lease.ids)
        lease.release()
        assert attached.hits == count
        start = stored.border - 5
        assert wrong(attached.fetch(start, deadline_s=LIMIT_S), stored.found[start:]) == 0
        attached.release()
        dropped = pool.engine.begin_match(stored.asked, stored.options, deadline_s=PATIENT_S)
        wait_until(lambda: dropped.poll() is not None or dropped.answers > 1, "two answers")
        dropped.cancel()
        all_given_back(cluster, 0, pool)


def test_a_load_attaches_to_the_parts_that_it_needs(cluster: Cluster, stored: Stored) -> None:
    """The others end with the release of their segments."""
    count = len(stored.found)
    with (
        join(cluster, 0, stored.layout) as pool,
        join(cluster, 0, stored.layout, session=pool, verify=True) as rank,
        pool.match(stored.asked, stored.options, deadline_s=PATIENT_S) as lease,
    ):
        needed = [count - 2, count - 1]
        lease.release(0, count - 2)
        parts = lease.parts_of(needed)
        assert len(parts.ids) < len(lease.ids)
        attached = rank.engine.attach(*parts.ids)
        assert attached.hits == parts.hits
        start = parts.within[count - 2]
        assert wrong(attached.fetch(start, start + 2, deadline_s=LIMIT_S), stored.found[count - 2 :]) == 0
        attached.release()


def test_a_prefix_match_ends_at_the_first_missing_segment(cluster: Cluster, prompt: Stored, spread: Stored) -> None:
    with cluster.connect(0, TINY) as pool:
        keys, other = prompt.found, pool.prefix(range(5, 5 + LONG)).keys
        for hits in (0, 10, MAX_KEYS, MAX_KEYS + 500, 2 * MAX_KEYS):
            with pool.match([*keys[:hits], *other[hits:]], deadline_s=PATIENT_S) as lease:
                assert lease.hits == hits
                assert lease.codes == bytes([Code.LOCAL]) * hits + bytes([Code.MISSING]) * (LONG - hits)
                assert wrong(lease.fetch(), keys[:hits]) == 0
    with join(cluster, 0) as pool, pool.match(spread.asked, deadline_s=PATIENT_S) as lease:
        assert lease.hits == NODES


def test_a_store_of_too_many_segments_reserves_the_first(cluster: Cluster) -> None:
    with cluster.connect(0, TINY) as pool:
        keys = pool.prefix(range(7, 7 + LONG)).keys
        with pool.store(keys) as write:
            assert len(write.codes) == LONG
            granted = write.codes.count(Code.RESERVED)
            assert 0 < granted == len(write.slots)
            assert set(write.codes[granted:]) == {Code.SESSION_LIMIT}
            for index, slot in write.slots:
                slot[:] = content(keys[index])
        with pool.match(keys, deadline_s=PATIENT_S) as lease:
            assert lease.hits == granted
            assert wrong(lease.fetch(), keys[:granted]) == 0
        reserved = pool.engine.reserve(keys[1:])
        assert len(reserved.codes) == LONG - 1
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
    stop = threading.Event()
    with scripted_link() as (link, daemon):
        thread = threading.Thread(target=answer_first, args=(daemon, stop))
        thread.start()
        state = PoolState(Grants(link), TINY, PATIENT, verify=False)
        keys = [SegmentKey(number.to_bytes(32, "big")) for number in range(4 * MAX_KEYS)]
        lease = PendingMatch(state, keys, "r", DEFAULT_MATCH, 1.0).wait()
        stop.set()
        thread.join()
        assert (lease.hits, len(lease.codes)) == (MAX_KEYS, len(keys))
        lease.release()
        assert link.channel.timeouts == 1


def test_requests_without_a_hit_have_no_part_in_the_lease(cluster: Cluster, spread: Stored) -> None:
    with join(cluster, 0) as pool:
        keys, other = list(spread.asked), pool.opaque_keys(engine_keys("not stored"))
        asked = [*other[:MAX_KEYS], *keys[:MAX_KEYS], *other[MAX_KEYS : 2 * MAX_KEYS], *keys[MAX_KEYS:]]
        with pool.match(asked, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert list(lease.keys) == spread.found
            assert len(lease.ids) == 3
            assert all(lease.ids)
            assert wrong(lease.fetch(deadline_s=LIMIT_S), spread.found) == 0
        with pool.match(other, INDEPENDENT, deadline_s=PATIENT_S) as lease:
            assert (lease.hits, lease.keys, lease.codes) == (0, [], bytes([Code.MISSING]) * SPREAD)
            assert lease.fetch() == []


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
                join(cluster, 0, layout, session=pool)


def test_attention_in_place_refuses_an_opaque_layout(cluster: Cluster, spread: Stored) -> None:
    refused = r"opaque: only its 'engine' 'vllm 0.32.0'"
    with join(cluster, 0) as pool, pool.match(spread.asked, INDEPENDENT, deadline_s=PATIENT_S) as lease:
        for attempt in (
            lambda: pool.queries.open_view(lease, 1, 1.0),
            lambda: pool.engine.init_transfer([(spread.asked, 0)]),
            lambda: pool.layout,
            lambda: pool.link.call(engine.OpenQuery, engine.QueryOpened),
        ):
            with pytest.raises(LayoutRefused, match=refused):
                attempt()
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
