"""A prompt that all ask for at once is computed once."""

from __future__ import annotations

from tests.core.scenes import ask, calm, copies, placed, said, store, tell
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tokenlake.core.waiting import IN_FLIGHT_CLAIMS, IN_FLIGHT_WAITS, MAX_IN_FLIGHT_WAIT_S
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

COMPUTES_S = 0.3


def wait_for(reader: Engine, keys: list[SegmentKey], in_flight_wait_s: float) -> list[engine.Matched]:
    """Where the reply to a match will be."""
    return ask(reader.processes[0], engine.Match, join_keys(keys), 0.0, True, "", None, 0, in_flight_wait_s)


def crowd(
    cluster: Cluster, engines: list[Engine], keys: list[SegmentKey], in_flight_wait_s: float
) -> tuple[list[engine.Matched], list[Engine]]:
    """Everybody asks at once, and computes what is missing: the answers, and who computed."""
    replies = [wait_for(reader, keys, in_flight_wait_s) for reader in engines]
    computed: list[Engine] = []
    for _ in range(2000):
        cluster.run_for(0.001)
        for reader, got in zip(engines, replies, strict=True):
            if got and got[0].hits < len(keys) and reader not in computed:
                computed.append(reader)
                reader.store(keys, 0, Storing(fill_s=COMPUTES_S))
    cluster.check()
    return [reply for (reply,) in replies], computed


def scene(nodes: int = 4, each: int = 2, **rules: float) -> tuple[Cluster, list[Engine], list[SegmentKey]]:
    cluster = calm(nodes, regions=8, dirty_share=1.0, session_reserve_share=1.0, **rules)
    engines = [cluster.join(node) for node in range(nodes) for _ in range(each)]
    cluster.run_for(0.1)
    keys = [*placed(cluster, 1, 2, 1), *placed(cluster, 0, 3, 1), *placed(cluster, 3, 0, 1)]
    return cluster, engines, keys


def test_one_computes_and_all_read() -> None:
    cluster, engines, keys = scene()
    replies, computed = crowd(cluster, engines, keys, 2.0)
    assert len(computed) == 1
    assert sorted(reply.hits for reply in replies) == [0, *[3] * 7]
    cores = [cluster.core(node) for node in range(4)]
    assert sum(core.counters[IN_FLIGHT_CLAIMS] for core in cores) == 1
    assert sum(core.counters[IN_FLIGHT_WAITS] for core in cores) == 7
    cluster.settle()
    cluster.check_settled()


def test_nobody_waits_unless_told_to() -> None:
    cluster, engines, keys = scene()
    _, computed = crowd(cluster, engines, keys, 0.0)
    assert len(computed) == len(engines)


def test_waiting_ends_when_the_writer_gives_up() -> None:
    cluster, engines, keys = scene(each=1)
    first, *others = engines
    got = wait_for(first, keys, 1.0)
    cluster.run_for(0.1)
    assert got[0].codes[0] == Code.MISSING
    waiting = [wait_for(e, keys, 5.0) for e in others]
    cluster.run_for(0.5)
    assert waiting == [[], [], []]
    # It was to compute for a second at most, and never came back: another is told to, and then the others' time is up.
    cluster.run_for(0.7)
    assert [len(replies) for replies in waiting].count(1) == 1
    cluster.run_for(5.0)
    assert [len(replies) for replies in waiting] == [1, 1, 1]
    assert all(replies[0].hits == 0 for replies in waiting)
    cluster.settle()
    cluster.check_settled()


def test_an_abort_hands_the_work_on_at_once() -> None:
    cluster, engines, keys = scene(each=1)
    prepared = ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    waiting = wait_for(engines[1], keys, 5.0)
    cluster.run_for(0.2)
    assert waiting == []
    tell(cluster, engines[0].processes[0], engine.Abort(prepared[0].write))
    cluster.run_for(0.2)
    assert waiting[0].hits == 0


def test_patience_is_bounded() -> None:
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    waiting = wait_for(engines[1], keys, 1e9)
    cluster.run_for(MAX_IN_FLIGHT_WAIT_S - 1.0)
    assert not waiting
    cluster.run_for(2.0)
    assert waiting[0].codes[0] == Code.PENDING
    cluster.check()


def test_who_misses_little_waits_for_as_little() -> None:
    cluster, engines, keys = scene(each=1, reservation_s=60.0)
    store(cluster, engines[2], keys[:2])
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys[2:]), 2)
    cluster.run_for(0.05)
    fields = join_keys(keys), 0.0, True, "", None, 0, 5.0, False
    short = ask(engines[1].processes[0], engine.Match, *fields, 0.3)
    whole = ask(engines[3].processes[0], engine.Match, *fields, 100.0)
    cluster.run_for(0.2)
    assert (short, whole) == ([], [])
    cluster.run_for(0.4)
    assert [(reply.hits, reply.codes[2]) for reply in short] == [(2, Code.PENDING)]
    assert whole == []
    cluster.run_for(5.0)
    assert [reply.hits for reply in whole] == [2]


def test_an_engine_that_dies_while_it_waits_leaves_nothing() -> None:
    cluster, engines, keys = scene(each=1)
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    wait_for(engines[1], keys, 5.0)
    cluster.run_for(0.1)
    engines[1].die()
    cluster.run_for(0.2)
    assert not cluster.core(1)._matches.matching
    cluster.settle()
    cluster.check_settled()


def test_what_was_found_at_a_node_that_died_meanwhile_is_not_promised() -> None:
    cluster, engines, keys = scene(each=1)
    store(cluster, engines[1], keys[:1])
    assert copies(cluster, keys[0]).keys() <= {1, 2}
    ask(engines[0].processes[0], engine.Prepare, join_keys(keys[1:]), 1)
    cluster.run_for(0.05)
    waiting = wait_for(engines[3], keys, 5.0)
    cluster.run_for(0.1)
    assert waiting == []
    cluster.node(1).crash()
    cluster.node(2).crash()
    cluster.run_for(0.5)
    assert waiting[0].hits == 0
    assert waiting[0].codes[0] == Code.UNKNOWN
    cluster.settle()
    cluster.check_settled()


def test_whoever_waits_asks_nobody_but_the_directory_node_of_what_comes_next() -> None:
    cluster, engines, keys = scene(each=1)
    prepared = ask(engines[0].processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    before = {node: len(said(cluster, node, peer.LookupReply)) for node in range(4)}
    waiting = wait_for(engines[3], keys, 5.0)
    cluster.run_for(2.0)
    asked = {node: len(said(cluster, node, peer.LookupReply)) - before[node] for node in range(4)}
    assert asked.pop(1) > 10
    assert asked == {0: 1, 2: 1, 3: 0}
    tell(cluster, engines[0].processes[0], engine.Abort(prepared[0].write))
    cluster.run_for(0.2)
    assert waiting[0].codes[0] == Code.MISSING
