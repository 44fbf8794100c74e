"""What an engine is about to compute is waited for, until it is stored, taken back, or the engine ends."""

from __future__ import annotations

from tests.core.scenes import ask, calm, placed, said, store, tell
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.core.waiting import MAX_CLAIMED, MAX_IN_FLIGHT_WAIT_S
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys


def scene() -> tuple[Cluster, Engine, Engine, list[SegmentKey]]:
    """A writer, a reader, and a prompt whose directory nodes are all nodes."""
    cluster = calm(regions=8, dirty_share=1.0, session_reserve_share=1.0, reservation_s=60.0)
    writer, reader = cluster.join(0), cluster.join(2)
    cluster.run_for(0.1)
    return cluster, writer, reader, [*placed(cluster, 1, 2, 2), *placed(cluster, 0, 1, 2), *placed(cluster, 2, 0, 1)]


def claim(cluster: Cluster, writer: Engine, keys: list[SegmentKey], seconds: float) -> None:
    tell(cluster, writer.processes[0], engine.Claim(join_keys(keys), seconds))
    cluster.run_for(0.02)


def patient(reader: Engine, keys: list[SegmentKey], in_flight_wait_s: float = 5.0) -> list[engine.Matched]:
    return ask(reader.processes[0], engine.Match, join_keys(keys), 0.0, True, "", None, 0, in_flight_wait_s)


def test_a_prompt_that_is_stored_in_parts_is_waited_for_to_its_end() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys, 5.0)
    waiting = patient(reader, keys)
    for start, stop in ((0, 2), (2, 4)):
        cluster.run_for(0.3)
        store(cluster, writer, keys[start:stop], first=start)
        cluster.run_for(0.3)
        assert waiting == []
    store(cluster, writer, keys[4:], first=4)
    cluster.run_for(0.3)
    assert [reply.hits for reply in waiting] == [5]


def test_without_a_claim_whoever_waits_computes_what_comes_after_the_first_part() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys[:2], 5.0)
    waiting = patient(reader, keys)
    cluster.run_for(0.3)
    store(cluster, writer, keys[:2])
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[2]) for reply in waiting] == [(2, Code.MISSING)]


def test_a_claim_that_is_taken_back_is_waited_for_no_longer() -> None:
    cluster, writer, reader, keys = scene()
    store(cluster, writer, keys[:1])
    claim(cluster, writer, keys, 5.0)
    waiting = patient(reader, keys)
    cluster.run_for(0.3)
    assert waiting == []
    claim(cluster, writer, keys, 0.0)
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[1]) for reply in waiting] == [(1, Code.MISSING)]


def test_what_is_being_written_stays_announced() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys, 5.0)
    ask(writer.processes[0], engine.Prepare, join_keys(keys), 0)
    cluster.run_for(0.05)
    claim(cluster, writer, keys, 0.0)
    waiting = patient(reader, keys, 2.0)
    cluster.run_for(1.5)
    assert waiting == []


def test_claims_end_with_the_process() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys, 5.0)
    waiting = patient(reader, keys)
    cluster.run_for(0.3)
    assert waiting == []
    writer.die()
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[0]) for reply in waiting] == [(0, Code.MISSING)]
    assert cluster.core(0).census()["claims"] == 0


def test_claims_end_with_their_time() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys, 0.5)
    waiting = patient(reader, keys)
    cluster.run_for(0.8)
    assert [(reply.hits, reply.codes[0]) for reply in waiting] == [(0, Code.MISSING)]
    claim(cluster, writer, keys, 1e9)
    assert max(said.deadline_s for said in announced(cluster)) == MAX_IN_FLIGHT_WAIT_S


def announced(cluster: Cluster) -> list[peer.MarkInFlight]:
    return said(cluster, 0, peer.MarkInFlight)


def test_one_process_claims_so_much_at_most_and_the_oldest_makes_room() -> None:
    cluster, writer, reader, keys = scene()
    claim(cluster, writer, keys, 5.0)
    many = [SegmentKey(number.to_bytes(32, "big")) for number in range(2 * MAX_CLAIMED)]
    claim(cluster, writer, many, 5.0)
    assert cluster.core(0).census()["claims"] == MAX_CLAIMED
    waiting = patient(reader, keys)
    cluster.run_for(0.3)
    assert [(reply.hits, reply.codes[0]) for reply in waiting] == [(0, Code.MISSING)]
    cluster.check()
