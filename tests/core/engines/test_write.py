"""Prepare, commit and abort: codes, slots, shards of several processes, and deadlines."""

from __future__ import annotations

from tests.core.scenes import answer, calm, copies, match, placed, prepare, store, stored, tell
from tests.sim.arena import content
from tests.sim.prompts import prompt
from tokenlake.wire import Code, engine


def test_existing_and_in_flight_keys_get_no_slot() -> None:
    cluster = calm()
    writer, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    store(cluster, writer, keys[:1])
    assert list(prepare(cluster, writer, keys).codes) == [Code.EXISTS, Code.RESERVED]
    assert list(prepare(cluster, other, keys).codes) == [Code.EXISTS, Code.PENDING]
    assert prepare(cluster, other, keys).write == 0


def test_a_prepare_touches_existing_segments() -> None:
    """An engine has just computed the existing segments again, so that they are in use and must not be evicted next."""
    cluster, _, keys = stored(2)
    writer = cluster.engines[0]
    before = [copies(cluster, key)[0].touched for key in keys]
    prepare(cluster, writer, keys)
    assert all(copies(cluster, key)[0].touched > touched for key, touched in zip(keys, before, strict=True))


def test_session_limit_and_write_budget() -> None:
    cluster = calm(session_reserve_share=0.25, dirty_share=0.4)
    keys = placed(cluster, 0, 1, 9)
    writers = [cluster.join(0), cluster.join(0)]
    codes = [list(prepare(cluster, writer, keys[4 * at : 4 * at + 4]).codes) for at, writer in enumerate(writers)]
    assert codes[0] == [Code.RESERVED] * 3 + [Code.SESSION_LIMIT]
    assert codes[1] == [Code.RESERVED] * 2 + [Code.WRITE_BUDGET] * 2


def test_shards_of_two_processes_make_one_segment() -> None:
    cluster = calm()
    writer = cluster.join(0, processes=2)
    cluster.run_for(0.01)
    first, second = writer.processes
    key = placed(cluster, 0, 1)[0]
    prepared = prepare(cluster, writer, [key])
    attached = answer(cluster, second, engine.Attach, prepared.write)
    assert attached.slots == prepared.slots
    zero, one = content("red", key)
    first.view(prepared.slots, key).write(0, zero)
    assert list(answer(cluster, first, engine.Commit, prepared.write, (0,), 1, zero).codes) == [Code.RESERVED]
    assert match(cluster, writer, [key]).codes == bytes([Code.PENDING])
    second.view(prepared.slots, key).write(1, one)
    assert list(answer(cluster, second, engine.Commit, prepared.write, (0,), 2, one).codes) == [Code.COMMITTED]
    assert match(cluster, writer, [key]).checksums == zero + one


def test_an_expired_write_keeps_only_slots_that_may_be_written() -> None:
    """The process filled its part of the first slot. Its late commit publishes nothing and frees the other slot."""
    cluster = calm()
    writer, other = cluster.join(0), cluster.join(0)
    keys = placed(cluster, 0, 1, 2)
    prepared = prepare(cluster, writer, keys)
    process, fields = writer.processes[0], (prepared.write, (0,), 1, bytes(8))
    assert list(answer(cluster, process, engine.Commit, *fields).codes) == [Code.RESERVED]
    cluster.run_for(cluster.rules["reservation_s"])
    again = prepare(cluster, other, keys)
    assert list(again.codes) == [Code.RESERVED] * 2
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [1]
    late = answer(cluster, process, engine.Commit, prepared.write, (1,), 3, bytes(16))
    assert list(late.codes) == [Code.EXPIRED]
    assert [pool.quarantined for pool in cluster.core(0).store.pools()] == [0]
    cluster.check()


def test_a_key_twice_in_one_prepare_leaks_no_slot() -> None:
    """The first entry exists, a reservation between them evicts it, and the last entry is reserved again."""
    cluster = calm(1, regions=1, dirty_share=1.0, session_reserve_share=1.0)
    writer = cluster.join(0)
    cluster.run_for(0.01)
    keys = prompt("twice", 40)
    codes = prepare(cluster, writer, keys).codes
    room = codes.count(Code.RESERVED)
    writer.die()
    cluster.run_for(0.01)
    writer = cluster.join(0)
    store(cluster, writer, keys[:room])
    reply = prepare(cluster, writer, [keys[0], *keys[room : 2 * room], keys[0]])
    assert reply.codes[0] == Code.EXISTS
    assert Code.RESERVED in reply.codes
    tell(cluster, writer.processes[0], engine.Abort(reply.write))
    cluster.check()
    assert cluster.core(0).idle()
