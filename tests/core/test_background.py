"""Pushes and copies leave reads their share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.scenes import ask, calm, match, placed, prepare, said, store
from tests.sim.arena import SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tokenlake.core.fetch import MAX_CREDIT, MAX_PIECE_BYTES, MAX_PIECES, BackgroundLimit
from tokenlake.core.instructions import StartFetch
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.store import Kind
from tokenlake.wire import Code, engine

MIB = 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 32)), max_size=200), st.floats(0.05, 0.9))
def test_what_comes_beside_reads_is_at_most_its_share(wanted: list[tuple[bool, int]], share: float) -> None:
    """A read is under way all the time."""
    background = BackgroundLimit(share)
    background.started(MIB, background=False)
    read, kept = MIB, 0
    for is_read, mib in wanted:
        if is_read:
            background.started(mib * MIB, background=False)
            background.ended(background=False)
            read += mib * MIB
        elif background.allows(mib * MIB):
            background.started(mib * MIB, background=True)
            background.ended(background=True)
            kept += mib * MIB
        assert kept <= share * (read + kept) + 1


def test_alone_it_takes_all_but_not_all_at_once() -> None:
    background = BackgroundLimit(0.5)
    for _ in range(MAX_PIECES):
        assert background.allows(1 << 40)
        background.started(1 << 40, background=True)
    assert not background.allows(1)
    background.ended(background=True)
    assert background.allows(1)


def test_what_is_saved_up_is_bounded() -> None:
    background = BackgroundLimit(0.9)
    background.started(1 << 50, background=False)
    background.started(MAX_CREDIT - 1, background=True)
    background.ended(background=True)
    assert background.allows(1)
    assert not background.allows(2)


def test_a_segment_that_is_more_than_can_be_saved_up_comes_all_the_same() -> None:
    background = BackgroundLimit(0.5)
    background.started(MIB, background=False)
    assert not background.allows(2 * MAX_CREDIT)
    background.started(MAX_CREDIT, background=False)
    assert background.allows(2 * MAX_CREDIT)
    background.started(2 * MAX_CREDIT, background=True)
    background.ended(background=True)
    # What was more than its share is made up for first.
    background.started(MAX_CREDIT, background=False)
    assert not background.allows(MIB)
    background.started(2 * MIB, background=False)
    assert background.allows(MIB)


def test_pieces_take_a_moment_and_are_never_nothing() -> None:
    background = BackgroundLimit(0.5)
    assert background.piece_segments(MIB, 0.001) == MAX_PIECE_BYTES // MIB
    assert background.piece_segments(MIB, 0.02) == 2
    assert background.piece_segments(64 * MIB, 10.0) == 1


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
    assert cluster.core(0).census()["queued transfers"] > 0
    cluster.node(2).thaw()
    cluster.run_for(1.5)
    assert cluster.core(0).census()["queued transfers"] == 0
    cluster.check()
    cluster.settle()
    cluster.check_settled()


def test_what_an_engine_wants_does_not_wait_its_turn() -> None:
    cluster, reader, writer, keys = scene()
    cluster.core(0)._transfers._limit._fetches += 1
    writer.store(keys[:2], 0, Storing())
    cluster.run_for(0.2)
    assert cluster.core(0).census()["queued transfers"] > 0
    found = match(cluster, reader, keys[:2])
    fetched = ask(reader.processes[0], engine.Fetch, found.lease, 0, found.hits, 0.5)
    cluster.run_for(0.3)
    assert fetched
    assert list(fetched[0].codes) == [Code.LOCAL] * 2
    cluster.core(0)._transfers._limit._fetches -= 1
    cluster.check()


def test_what_waited_too_long_is_kept_by_its_writer() -> None:
    cluster, _, writer, keys = scene()
    cluster.core(0)._transfers._limit._fetches += 1
    prepare(cluster, writer, [])
    writer.store(keys[:2], 0, Storing())
    cluster.run_for(3.0)
    cluster.core(0)._transfers._limit._fetches -= 1
    assert cluster.core(0).census()["queued transfers"] == 0
    assert cluster.keepers() == {("red", key): ["n1"] for key in keys[:2]}
    kept = [segment for segment in cluster.core(1).store.segments() if segment.kind is Kind.PRIMARY]
    assert sum(segment.slot_bytes for segment in kept) == 2 * SLOT_BYTES
    cluster.settle()
    cluster.check_settled()
