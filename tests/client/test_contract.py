"""What every pool does, at a daemon and at the `MemoryDaemon` that ships for tests of programs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from tests.client.connections import refill
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    daemons,
    flip,
    match,
    outcomes,
    read,
    store,
    wait_until,
)
from tokenlake.errors import Refused, Unreachable
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code, engine
from tokenlake_client import MatchOptions, Pool
from tokenlake_client.testing import MemoryDaemon, MemoryPool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

Connect = Callable[..., Pool]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.fixture(params=["memory", "daemon"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens pools at one daemon with 4 MiB."""
    opened: list[Pool] = []
    daemon = MemoryDaemon(4 << 20)

    def connect(layout: Any = LAYOUT, **options: Any) -> Pool:
        if request.param == "memory":
            opened.append(MemoryPool(layout, daemon, deadlines=PATIENT, **options))
        else:
            socket = request.getfixturevalue("cluster").nodes[0].socket
            opened.append(Pool.connect(socket, layout, deadlines=PATIENT, **options))
        return opened[-1]

    yield connect
    for pool in opened:
        pool.close()


def test_segments_are_stored_and_read(connect: Connect) -> None:
    pool, prompt = connect(), Prompt(900, 6)
    assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
    assert outcomes(store(pool, prompt)) == {Code.EXISTS}
    with match(pool, prompt) as lease:
        assert (lease.hits, lease.local_hits, set(lease.nodes())) == (6, 6, {pool.node})
        arrays = lease.fetch(1, 5)
        assert prompt.wrong(arrays, start=1) == 0
        with pytest.raises(ValueError, match="read-only"):
            arrays[0][0] = 1
        out = np.zeros((8, LAYOUT.segment_bytes), np.uint8)
        assert lease.copy_into(list(out), start=1) == 5
        assert prompt.wrong(list(out[:5]), start=1) == 0
    other = Prompt(902, 2, Prompt(900, 3))
    other.tokens[: 3 * LAYOUT.segment_tokens] = prompt.tokens[: 3 * LAYOUT.segment_tokens]
    with match(pool, other) as lease:
        assert (lease.hits, outcomes(lease.codes[3:])) == (3, {Code.MISSING}), "up to where the prompts differ"
        assert other.wrong(lease.fetch()) == 0
    with match(pool, Prompt(901, 3)) as lease, pool.match([]) as empty:
        assert (lease.hits, outcomes(lease.codes), lease.fetch(), empty.hits) == (0, {Code.MISSING}, [], 0)
    assert read(connect(), prompt) == 6, "another engine"
    assert match(connect(structs.replace(LAYOUT, model_id="other")), prompt).hits == 0


def test_arrays_are_stored(connect: Connect) -> None:
    """One of the segments may be stored already."""
    pool, prompt = connect(), Prompt(30, 40)
    segments = np.stack([np.frombuffer(prompt.content(index), np.uint8) for index in range(40)])
    keys = pool.prefix(prompt.tokens).keys
    with pool.store(keys[3:4]) as write:
        write.fill(segments[3:4])
        with pytest.raises(ValueError, match="read-only"):
            write.slots[0][1][0] = 1
    assert write.commit() == bytes([Code.COMMITTED]), "a second commit only repeats the codes"
    codes = pool.store_all(keys, segments, patience=LIMIT_S)
    assert [index for index, code in enumerate(codes) if code == Code.EXISTS] == [3]
    assert codes.count(Code.COMMITTED) == 39
    with match(connect(verify=True), prompt) as lease:
        assert prompt.wrong(lease.fetch()) == 0


def test_a_write_is_aborted_pending_or_repeated(connect: Connect) -> None:
    """With the checksums of a fill that failed, all nodes would refuse the right bytes of the next one."""
    pool, prompt = connect(), Prompt(903, 3)
    keys = pool.prefix(prompt.tokens).keys
    failing = iter([False, True])

    def prefill(index: int, slot: NDArray[np.uint8]) -> None:
        if next(failing, False):
            raise RuntimeError("mid-prefill")
        prompt.fill(index, slot)

    write = pool.store(keys)
    assert outcomes(store(pool, prompt, patience=0.0)) == {Code.PENDING}
    with pytest.raises(RuntimeError, match="mid-prefill"), write:
        write.fill(prefill)
    write.abort()
    assert match(pool, prompt).hits == 0
    with pytest.raises(ZeroDivisionError):
        pool.store_all(keys, lambda index, slot: 1 // 0)  # type: ignore[arg-type]
    failing = iter([False, True])
    with pool.store(keys) as write:
        with pytest.raises(RuntimeError, match="mid-prefill"):
            write.fill(prefill)
        write.fill(prefill)
    with match(connect(verify=True), prompt) as lease:
        assert len(lease.fetch()) == 3


def test_what_is_leased_or_viewed_is_not_evicted(connect: Connect) -> None:
    pool, prompt = connect(), Prompt(904, 8)
    keys = pool.prefix(prompt.tokens).keys
    store(pool, prompt)
    lease = match(pool, prompt)
    for _ in range(2):
        lease.release(2, 5)
    assert len(lease.fetch()) == 2, "a fetch ends at the first released segment"
    refill(pool, 41)
    kept = lease.fetch(5, 8)
    assert (len(kept), prompt.wrong(kept, start=5)) == (3, 0)
    with match(pool, prompt) as whole:
        assert whole.hits == 8, "what is leased keeps what is before it"
    view = kept[1].view(np.float32).reshape(2, -1)[1][5:][::2]
    expected = view.copy()
    del kept
    lease.release()
    refill(pool, 42)
    assert view.tobytes() == expected.tobytes()
    with pool.match(keys[1:]) as held:
        assert held.hits == 7
    del view, lease, held, whole
    gc.collect()
    refill(pool, 43)
    with pool.match(keys[6:7]) as gone:
        assert gone.hits == 0, "the last array is gone, and the lease ended"


def test_a_session_with_many_open_writes_is_refused(connect: Connect) -> None:
    pool = connect()
    writes = [pool.store(pool.prefix(Prompt(1000 + number, 32).tokens).keys) for number in range(9)]
    assert outcomes(bytes(writes[-1].codes)) == {Code.SESSION_LIMIT}
    for write in writes:
        write.abort()
    assert outcomes(store(pool, Prompt(1100, 8))) == {Code.COMMITTED}


def test_processes_share_leases_and_writes(connect: Connect) -> None:
    pool, prompt = connect(), Prompt(905, 3)
    rank = connect(session=pool.engine.session)
    assert rank.engine.session == pool.engine.session
    keys = pool.prefix(prompt.tokens).keys
    reserved = pool.engine.reserve(keys)
    assert outcomes(reserved.codes) == {Code.RESERVED}
    for shard, process in enumerate((pool, rank)):
        write = process.engine.attach_write(reserved.id)
        part = slice(shard * LAYOUT.shard_bytes, (shard + 1) * LAYOUT.shard_bytes)
        for index, slot in write.slots:
            slot[part] = np.frombuffer(prompt.content(index)[part], np.uint8)
        expected = Code.COMMITTED if shard else Code.RESERVED
        assert outcomes(write.commit(1 << shard)) == {expected}
        write.leave()
    reserved.release()
    lease = match(pool, prompt)
    attached = rank.engine.attach(*lease.ids)
    lease.release()
    assert prompt.wrong(attached.fetch()) == 0
    attached.release()

    def ended() -> bool:
        again = pool.engine.attach(*lease.ids)
        again.release()
        return not again.hits

    wait_until(ended, "the lease has ended")
    with pytest.raises(Refused):
        pool.engine.attach_write(reserved.id)
    with pytest.raises(Refused):
        connect(structs.replace(LAYOUT, layers=3), session=pool.engine.session)


def test_a_match_waits_for_another_engine(connect: Connect) -> None:
    first, second, prompt = connect(), connect(), Prompt(906, 2)
    keys = first.prefix(prompt.tokens).keys
    options = MatchOptions(in_flight_wait_s=10.0, request="waits")
    assert first.match(keys, options).hits == 0
    first.engine.mark_in_flight(keys, 10.0)
    pending = second.engine.begin_match(keys, options)
    assert pending.poll() is None
    assert second.link.call(engine.Heartbeat, engine.HeartbeatReply).alive, "it is answered while a match waits"
    assert pending.poll() is None
    store(first, prompt)
    lease = pending.wait()
    assert (lease.hits, lease.request) == (2, "waits")
    assert prompt.wrong(lease.fetch()) == 0


def test_keys_of_an_opaque_layout(connect: Connect) -> None:
    sizes: dict[str, Any] = {"shards": 2, "shard_bytes": 512, "segment_tokens": 16}
    pool = connect(OpaqueLayout(model_id="m", weights_digest="00", engine="e 1", cache="c", **sizes))
    names = [(0, bytes([number]) * 32) for number in range(4)]
    keys = pool.opaque_keys(names)
    pool.store_all(keys[1:3], [np.full(1024, number, np.uint8) for number in (1, 2)], patience=LIMIT_S)
    with pool.match(keys, MatchOptions(independent=True)) as lease:
        assert [Code(code) for code in lease.codes] == [Code.MISSING, Code.LOCAL, Code.LOCAL, Code.MISSING]
        assert [array[-1] for array in lease.fetch()] == [1, 2]
    assert keys == pool.opaque_keys(names, weights_digest="00")
    some: list[dict[str, Any]] = [{}, {"adapter": "lora"}, {"salt": "lora"}, {"weights_digest": "01"}]
    assert len({key for options in some for key in pool.opaque_keys(names, **options)}) == len(names) * len(some)
    with pytest.raises(ValueError, match="20 bytes; expected 32"):
        pool.opaque_keys([(0, bytes(20))])
    with pytest.raises(ValueError, match=r"in_flight_wait_s is 1\.0"):
        MatchOptions(independent=True, in_flight_wait_s=1.0)


def test_a_flipped_bit_is_found(connect: Connect) -> None:
    pool, prompt = connect(), Prompt(907, 4)
    store(pool, prompt)
    assert flip(pool, pool.prefix(prompt.tokens).keys[2])
    careful = connect(verify=True)
    with match(careful, prompt) as lease:
        assert prompt.wrong(lease.fetch()) == 0
        assert (careful.corrupt, lease.code(2)) == (1, Code.LOCAL)
        assert lease.copy_into(list(np.empty((4, LAYOUT.segment_bytes), np.uint8))) == 2
    wait_until(lambda: match(pool, prompt).hits == 2, "the copy was dropped")


def test_a_closed_pool_is_unreachable(connect: Connect) -> None:
    pool, prompt = connect(), Prompt(908, 2)
    store(pool, prompt)
    arrays = match(pool, prompt).fetch()
    pool.close()
    with pytest.raises(Unreachable):
        match(pool, prompt)
    assert prompt.wrong(arrays) == 0


# What only a memory daemon offers.


def test_a_memory_daemon_stops_and_starts() -> None:
    prompt = Prompt(909, 2)
    with MemoryPool(LAYOUT, deadlines=PATIENT) as pool:
        store(pool, prompt)
        arrays, lease = match(pool, prompt).fetch(), match(pool, prompt)
        pool.daemon.stop()
        assert not pool.connected
        with pytest.raises(Unreachable):
            match(pool, prompt)
        pool.daemon.start()
        wait_until(lambda: pool.connected, "connected again")
        assert match(pool, prompt).hits == 0
        with pytest.raises(Unreachable):
            lease.fetch()
        assert prompt.wrong(arrays) == 0


def test_a_frozen_memory_daemon_answers_later() -> None:
    with MemoryPool(LAYOUT) as pool:
        pool.daemon.freeze()
        pending = pool.engine.begin_match([])
        assert pending.poll() is None
        pool.daemon.thaw()
        assert pending.poll() is not None


def test_messages_are_intercepted() -> None:
    seen: list[engine.EngineRequest] = []

    def intercept(message: engine.EngineRequest) -> engine.EngineReply | None:
        seen.append(message)
        if isinstance(message, engine.Prepare):
            raise Unreachable("no writes today")
        if isinstance(message, engine.Locate):
            return engine.Located(0, ("elsewhere",), bytes(2))
        return None

    prompt = Prompt(910, 2)
    with MemoryPool(LAYOUT) as pool:
        store(pool, prompt)
        pool.daemon.intercept = intercept
        with pytest.raises(Unreachable, match="no writes today"):
            store(pool, Prompt(911, 1))
        with pool.match(pool.prefix(prompt.tokens).keys, MatchOptions(request="named")) as lease:
            assert lease.nodes() == ["elsewhere"] * 2
        assert [each.request for each in seen if isinstance(each, engine.Match)] == ["named"]


def test_a_quota_of_a_memory_daemon() -> None:
    with MemoryPool(LAYOUT, MemoryDaemon(4 << 20, quota=0.25)) as pool:
        prompts = [Prompt(920 + number, 16) for number in range(8)]
        for prompt in prompts:
            store(pool, prompt, patience=0.0)
        assert 0 < sum(match(pool, prompt).hits for prompt in prompts) * LAYOUT.segment_bytes <= 1 << 20
