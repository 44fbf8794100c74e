"""Engine processes that freeze or die, an arena with no slot to give, and a peer that sends too late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.robustness.fake_peer import FakePeer
from tests.robustness.live import (
    LAYOUT,
    PATIENT,
    EngineProcess,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_until,
)
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client import Pool

pytestmark = pytest.mark.live

SHORT: dict[str, Any] = {"lease_s": "0.4", "reservation_s": "0.4"}


def refill(pool: Pool, seed: int) -> list[Prompt]:
    """Write more than fits into the arena; returns the last prompts."""
    prompts = [Prompt(seed * 100 + number, 32) for number in range(12)]
    for prompt in prompts:
        store(pool, prompt)
    return prompts[-4:]


def test_an_engine_that_slept_past_its_deadlines() -> None:
    with daemons(**SHORT) as cluster, EngineProcess(cluster.nodes[0].socket) as sleeper:
        node = cluster.nodes[0]
        sleeper.ask("store", seed=1, segments=6)
        assert sleeper.ask("match", seed=1, segments=6)["hits"] == 6
        assert sleeper.ask("prepare", seed=2, segments=5)["codes"] == [Code.RESERVED] * 5
        sleeper.freeze()
        wait_until(lambda: total(node, "tokenlake_expired_sessions_total") == 1, "its session expired")
        wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 5, "what it reserved is in quarantine")
        with cluster.connect(0, LAYOUT) as other:
            assert outcomes(match(other, Prompt(2, 5)).codes) == {Code.MISSING}
            assert outcomes(store(other, Prompt(2, 5))) == {Code.COMMITTED}, "another engine can store these segments"
            kept = refill(other, 7)
            leases = [match(other, prompt) for prompt in kept]
            views = [lease.fetch() for lease in leases]
            sleeper.thaw()
            sleeper.ask("fill")
            assert [prompt.wrong(view) for prompt, view in zip(kept, views, strict=True)] == [0] * 4
            assert sleeper.ask("commit")["codes"] == [Code.EXPIRED] * 5
            assert sleeper.ask("compare") == {"hits": 6, "wrong": 0}, "its leased segments are unchanged"
            assert sleeper.ask("state")["connected"]
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "given back by the late commit")
            assert [prompt.wrong(view) for prompt, view in zip(kept, views, strict=True)] == [0] * 4
            del views, leases


def test_a_reader_that_slept_sees_what_it_leased() -> None:
    with daemons(**SHORT) as cluster, EngineProcess(cluster.nodes[0].socket) as sleeper:
        node = cluster.nodes[0]
        sleeper.ask("store", seed=3, segments=6)
        sleeper.ask("match", seed=3, segments=6)
        sleeper.freeze()
        wait_until(lambda: total(node, "tokenlake_expired_sessions_total") == 1, "its session expired")
        with cluster.connect(0, LAYOUT) as other:
            refill(other, 8)
            sleeper.thaw()
            assert sleeper.ask("compare") == {"hits": 6, "wrong": 0}
            refill(other, 9)
            assert sleeper.ask("compare") == {"hits": 6, "wrong": 0}
            sleeper.ask("release")
            wait_until(lambda: sleeper.ask("state")["expired"] == 1, "it was told that its session had expired")
            refill(other, 10)
            assert read(other, Prompt(3, 6)) == 0


def test_slots_of_a_killed_engine_come_back() -> None:
    with daemons() as cluster, cluster.connect(0, LAYOUT) as other:
        node = cluster.nodes[0]
        slots = total(node, "tokenlake_slots")
        with EngineProcess(node.socket) as engine:
            engine.ask("store", seed=4, segments=20)
            engine.ask("match", seed=4, segments=20)
            engine.ask("prepare", seed=5, segments=10)
            refill(other, 11)
            assert read(other, Prompt(4, 20)) == 20, "the leases of a running engine hold"
            engine.kill()
            wait_until(lambda: total(node, "tokenlake_processes") == 1, "its death is seen")
        assert total(node, "tokenlake_quarantined_slots") == 0
        assert outcomes(store(other, Prompt(5, 10))) == {Code.COMMITTED}
        refill(other, 12)
        assert read(other, Prompt(4, 20)) == 0
        assert total(node, "tokenlake_slots") >= slots


def test_frozen_and_killed_engine_frees_its_quarantine() -> None:
    with daemons(**SHORT) as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("prepare", seed=6, segments=8)
        engine.freeze()
        wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 8, "in quarantine")
        engine.kill()
        wait_until(lambda: total(node, "tokenlake_processes") == 0, "its death is seen")
        assert total(node, "tokenlake_quarantined_slots") == 0


def test_a_rank_that_never_commits_its_shard() -> None:
    """The other rank has committed its shard and holds the slots no longer: they are free when the first rank has
    ended."""
    with daemons(**SHORT) as cluster, cluster.connect(0, LAYOUT) as pool:
        node = cluster.nodes[0]
        prompt = Prompt(13, 3)
        with EngineProcess(node.socket, pool.engine.session) as rank:
            write = pool.store(pool.prefix(prompt.tokens).keys)
            rank.ask("attach_write", write=write.id, seed=13, segments=3)
            for index, array in write.slots:
                prompt.fill(index, array)
            assert outcomes(write.commit(0b01)) == {Code.RESERVED}
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 3, "the reservation ended")
        wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "the rank is dead")
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}


def test_every_refusal_names_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text("session_lease_share = 1.0\nsession_reserve_share = 0.5\ndirty_share = 0.8\n")
    with daemons(1, "256KiB", "256KiB", config=str(file), **SHORT) as cluster, cluster.connect(0, LAYOUT) as pool:
        node = cluster.nodes[0]
        prompt = Prompt(14, 4)
        store(pool, prompt)
        slots = int(total(node, "tokenlake_slots"))
        half = Prompt(15, slots // 2 - 4, prompt)
        everything = Prompt(16, slots - half.segments, half)
        assert outcomes(store(pool, half)) == {Code.EXISTS, Code.COMMITTED}
        assert outcomes(store(pool, everything)) == {Code.EXISTS, Code.COMMITTED}
        lease = match(pool, everything)
        assert lease.hits == slots

        def reasons(seed: int, segments: int = 1) -> set[Code]:
            write = pool.store(pool.prefix(Prompt(seed, segments).tokens).keys)
            write.abort()
            return outcomes(bytes(write.codes))

        assert reasons(23) == {Code.NO_SLOT}, "everything is leased"
        lease.release()
        assert reasons(17, slots // 2) == {Code.RESERVED}
        assert reasons(18, slots) == {Code.RESERVED, Code.SESSION_LIMIT}
        with EngineProcess(node.socket) as one, EngineProcess(node.socket) as two:
            assert set(one.ask("prepare", seed=19, segments=slots // 2)["codes"]) == {Code.RESERVED}
            assert Code.WRITE_BUDGET in two.ask("prepare", seed=20, segments=slots // 2)["codes"]
            one.freeze()
            two.freeze()
            wait_until(lambda: total(node, "tokenlake_expired_sessions_total") == 2, "both sessions expired")
            held = int(total(node, "tokenlake_quarantined_slots"))
            rest = match(pool, everything)
            assert rest.hits == slots - held or rest.hits == 0
            leases = [rest, *(pool.match([key]) for key in pool.prefix(everything.tokens).keys[rest.hits :])]
            assert sum(each.hits for each in leases) == slots - held
            assert reasons(21) == {Code.NO_SLOT}, "everything is leased or in quarantine"
            for each in leases:
                each.release()
        other = Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"layers": 3})
        with Pool.connect(node.socket, other, deadlines=PATIENT) as stranger:
            write = stranger.store(stranger.prefix(prompt.tokens).keys)
            assert outcomes(bytes(write.codes)) == {Code.NO_REGION}


def test_bytes_that_come_late_reach_no_new_owner() -> None:
    """A peer sends wrong bytes slowly and the receiver gives up: the slots get new owners while the peer still
    sends."""
    with FakePeer("node1") as peer, daemons(1, "1MiB", "1MiB", peers=f"node1=127.0.0.1:{peer.port}") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            wait_until(lambda: total(node, "tokenlake_peers_connected") == 1, "the peer is connected")
            prompt = Prompt(22, 5)
            peer.serves(pool.prefix(prompt.tokens).keys, LAYOUT)
            for attempt in range(5):
                # After a fetch without a byte of a segment the peer is not asked until it has answered a probe.
                wait_until(lambda: match(pool, prompt).hits == 5, "the peer's segments are found")
                with match(pool, prompt) as lease:
                    # The deadline is long enough for the handshake and the Pull on a busy machine, and too short for a
                    # segment.
                    assert lease.fetch(deadline_s=0.5) == []
                # For the engine the fetch has ended. The daemon frees its slots only when the receiving thread has
                # returned.
                kept = [Prompt(300 + attempt * 10 + number, 14) for number in range(4)]
                for other in kept:
                    store(pool, other)
                for other in kept:
                    read(pool, other)
                wait_until(lambda attempt=attempt: peer.cut == attempt + 1, "the transfer was cut")  # type: ignore[misc]
                for other in kept:
                    read(pool, other)
            wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 0, "receivers returned")
            assert total(node, "tokenlake_received_segments_total") == 0
