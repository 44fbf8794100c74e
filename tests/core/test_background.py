"""Pushes and copies leave reads their share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.scenes import ask, calm, match, placed, prepare, said, store
from tests.sim.arena import SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tokenlake.core.background import FLIGHTS, MOST_CREDIT, PIECE_BYTES, Background
from tokenlake.core.instructions import StartFetch
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.store import Kind
from tokenlake.wire import Code, engine

MIB = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 32)), max_size=200), st.floats(0.05, 0.9))
def test_what_comes_beside_reads_is_at_most_its_share(wanted: list[tuple[bool, int]], share: float) -> None:
    """A read is under way all the time."""
    background = Background(share)
    background.departs(MIB, background=False)
    read, kept = MIB, 0
    for is_read, mib in wanted:
        if is_read:
            background.departs(mib * MIB, background=False)
            background.returned(background=False)
            read += mib * MIB
        elif background.may_depart(mib * MIB):
            background.departs(mib * MIB, background=True)
            background.returned(background=True)
            kept += mib * MIB
        assert kept <= share * (read + kept) + 1


def test_alone_it_takes_all_but_not_all_at_once() -> None:
    background = Background(0.5)
    for _ in range(FLIGHTS):
        assert background.may_depart(1 << 40)
        background.departs(1 << 40, background=True)
    assert not background.may_depart(1)
    background.returned(background=True)
    assert background.may_depart(1)


def test_what_is_saved_up_is_bounded() -> None:
    background = Background(0.9)
    background.departs(1 << 50, background=False)
    background.departs(MOST_CREDIT - 1, background=True)
    background.returned(background=True)
    assert background.may_depart(1)
    assert not background.may_depart(2)


def test_a_segment_that_is_more_than_can_be_saved_up_comes_all_the_same() -> None:
    background = Background(0.5)
    background.departs(MIB, background=False)
    assert not background.may_depart(2 * MOST_CREDIT)
    background.departs(MOST_CREDIT, background=False)
    assert background.may_depart(2 * MOST_CREDIT)
    background.departs(2 * MOST_CREDIT, background=True)
    background.returned(background=True)
    # What was more than its share is made up for first.
    background.departs(MOST_CREDIT, background=False)
    assert not background.may_depart(MIB)
    background.departs(2 * MIB, background=False)
    assert background.may_depart(MIB)


def test_pieces_take_a_moment_and_are_never_nothing() -> None:
    background = Background(0.5)
    assert background.piece(MIB, 0.001) == PIECE_BYTES // MIB
    assert background.piece(MIB, 0.02) == 2
    assert background.piece(64 * MIB, 10.0) == 1


def scene() -> tuple[Cluster, Engine, Engine, list[SegmentKey]]:
    """A reader at node 0, a writer at node 1 whose keys node 0 will keep."""
    cluster = calm(3, regions=10, dirty_share=1.0, session_reserve_share=1.0, cached_share=0.5)
    reader, writer = cluster.join(0), cluster.join(1)
    cluster.run_for(0.05)
    return cluster, reader, writer, placed(cluster, 0, 1, 8)


def begun(cluster: Cluster, node: int) -> list[StartFetch]:
    return said(cluster, node, StartFetch)


def test_pushes_wait_while_a_read_is_under_way() -> None:
    """And go on when it is done."""
    cluster, reader, writer, keys = scene()
    others = placed(cluster, 2, 1, 2, "read")
    helper = cluster.join(2)
    cluster.run_for(0.05)
    store(cluster, helper, others)
    found = match(cluster, reader, others)
    assert found.codes[0] == Code.REMOTE
    before = len(begun(cluster, 0))
    cluster.link("n0", "n2")
    cluster.node(2).freeze()
    ask(reader.processes[0], engine.Fetch, found.lease, 0, 2, 0.8)
    cluster.run_for(0.01)
    for start in range(0, 8, 2):
        writer.store(keys[start : start + 2], start, Storing())
    cluster.run_for(0.5)
    during = begun(cluster, 0)[before:]
    read = sum(len(each.keys) // KEY_BYTES for each in during if not each.background)
    kept = sum(len(each.keys) // KEY_BYTES for each in during if each.background)
    assert read == 2
    assert kept <= read
    assert cluster.core(0).census()["flights to come"] > 0
    cluster.node(2).thaw()
    cluster.run_for(1.5)
    assert cluster.core(0).census()["flights to come"] == 0
    cluster.check()
    cluster.settle()
    cluster.check_settled()


def test_what_an_engine_wants_does_not_wait_its_turn() -> None:
    cluster, reader, writer, keys = scene()
    cluster.core(0)._fetches._background._reads += 1
    writer.store(keys[:2], 0, Storing())
    cluster.run_for(0.2)
    assert cluster.core(0).census()["flights to come"] > 0
    found = match(cluster, reader, keys[:2])
    fetched = ask(reader.processes[0], engine.Fetch, found.lease, 0, found.hits, 0.5)
    cluster.run_for(0.3)
    assert fetched
    assert list(fetched[0].codes) == [Code.LOCAL] * 2
    cluster.core(0)._fetches._background._reads -= 1
    cluster.check()


def test_what_waited_too_long_is_kept_by_its_writer() -> None:
    cluster, _, writer, keys = scene()
    cluster.core(0)._fetches._background._reads += 1
    prepare(cluster, writer, [])
    writer.store(keys[:2], 0, Storing())
    cluster.run_for(3.0)
    cluster.core(0)._fetches._background._reads -= 1
    assert cluster.core(0).census()["flights to come"] == 0
    assert cluster.keepers() == {("red", key): ["n1"] for key in keys[:2]}
    kept = [segment for segment in cluster.core(1).store.segments() if segment.kind is Kind.PRIMARY]
    assert sum(segment.slot_bytes for segment in kept) == 2 * SLOT_BYTES
    cluster.settle()
    cluster.check_settled()
