"""Each missed token is counted once, for the tenant and the reason that `explain` would give, and with the cause of a
gap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.scenes import (
    ROOMY,
    calm,
    copies,
    explained,
    fetch,
    match,
    missed,
    placed,
    prepare,
    read,
    release,
    store,
    stored,
)
from tests.core.speed import KEYS, SLOT_BYTES, local_core
from tests.profiles import examples
from tests.sim.arena import SLOTS
from tests.sim.cluster import Cluster
from tests.sim.engine import SEGMENT_TOKENS, Reading, Storing
from tests.sim.prompts import PROMPTS, prompt
from tokenlake.core import events
from tokenlake.core.report.misses import GAPS, MISSED
from tokenlake.memory.removals import CORRUPT_RULE
from tokenlake.wire import engine
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.slots import join_keys

SIZE = SEGMENT_TOKENS
Scene = Callable[[], tuple[Cluster, int]]
SCENES: list[tuple[MissReason, str, Scene]] = []


def provokes(reason: MissReason, detail: str = "") -> Callable[[Scene], Scene]:
    """Declares a scene in which the request "r" misses tokens for this reason only, of which `explain` says `detail`.
    It returns the cluster and the node of the request."""

    def declare(scene: Scene) -> Scene:
        SCENES.append((reason, detail, scene))
        return scene

    return declare


@provokes(MissReason.NEVER_STORED, "not known to n0")
def new_prompt() -> tuple[Cluster, int]:
    cluster = calm(3, **ROOMY)
    read(cluster, cluster.join(2), placed(cluster, 0, 1, 2), "r")
    return cluster, 2


@provokes(MissReason.EVICTED, "least retention value, at n0 ")
def full_memory() -> tuple[Cluster, int]:
    cluster = calm(1, regions=1, **ROOMY)
    reader = cluster.join(0)
    store(cluster, reader, prompt("first", 2))
    cluster.run_for(10.0)
    for turn in range(3):
        store(cluster, reader, prompt(f"next {turn}", SLOTS))
    read(cluster, reader, prompt("first", 2), "r")
    return cluster, 0


@provokes(MissReason.EVICTED, "least retention value, at n0 ")
def full_memory_elsewhere() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(regions=1, pair=(1, 0), **ROOMY)
    for turn in range(6):
        store(cluster, cluster.engines[0], placed(cluster, 0, 1, SLOTS, f"next {turn}"))
    assert not copies(cluster, keys[0])
    read(cluster, reader, keys, "r")
    return cluster, 2


@provokes(MissReason.EVICTED, CORRUPT_RULE)
def dropped_as_wrong() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(pair=(2, 0), **ROOMY)
    cluster.node(0).arena.flip(copies(cluster, keys[0])[0].place, 0)
    read(cluster, reader, keys)
    cluster.run_for(0.1)
    read(cluster, cluster.join(1), keys, "r")
    return cluster, 1


@provokes(MissReason.TOO_SHORT)
def tail() -> tuple[Cluster, int]:
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    store(cluster, reader, prompt("p", 2))
    read(cluster, reader, prompt("p", 2), "r", 2 * SIZE + 5)
    return cluster, 0


@provokes(MissReason.PENDING)
def in_flight() -> tuple[Cluster, int]:
    cluster = calm(1, **ROOMY)
    prepare(cluster, cluster.join(0), prompt("p", 2))
    read(cluster, cluster.join(0), prompt("p", 2), "r")
    return cluster, 0


@provokes(MissReason.TOO_SLOW, "no answer from n0")
def frozen_at_the_match() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    cluster.node(0).freeze()
    read(cluster, reader, keys, "r")
    cluster.node(0).thaw()
    return cluster, 2


@provokes(MissReason.TOO_SLOW, "n0 did not")
def frozen_at_the_fetch() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    reply = match(cluster, reader, keys, "r")
    cluster.node(0).freeze()
    fetch(cluster, reader, reply.lease, 2)
    cluster.run_for(1.0)
    release(cluster, reader, reply.lease, 2)
    cluster.node(0).thaw()
    return cluster, 2


@provokes(MissReason.TOO_SLOW, "n0")
def no_bytes() -> tuple[Cluster, int]:
    """The first fetch finds out, and the match of the second one leases nothing."""
    cluster, reader, keys = stored(2, **ROOMY)
    cluster.node(0).silent = True
    for _ in range(2):
        read(cluster, reader, keys, "r")
    return cluster, 2


@provokes(MissReason.UNREACHABLE, "no connection with n1")
def partition() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    for node in (0, 1):
        cluster.link(f"n{node}", "n2").cut(60.0)
    read(cluster, reader, keys, "r")
    return cluster, 2


@provokes(MissReason.UNREACHABLE, "n0 is not connected")
def partition_from_the_owner() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    reply = match(cluster, reader, keys, "r")
    cluster.link("n0", "n2").cut(60.0)
    fetch(cluster, reader, reply.lease, 2)
    release(cluster, reader, reply.lease, 2)
    return cluster, 2


@provokes(MissReason.UNREACHABLE)
def owner_down() -> tuple[Cluster, int]:
    """The directory node answers UNKNOWN."""
    cluster, reader, keys = stored(2, pair=(1, 2), **ROOMY)
    cluster.node(0).crash()
    cluster.run_for(0.1)
    read(cluster, reader, keys, "r")
    return cluster, 2


@provokes(MissReason.UNKNOWN)
def incomplete_directory() -> tuple[Cluster, int]:
    """The directory node restarted, and one node has not told it yet what it owns."""
    cluster = calm(3, sync_grace_s=60.0, **ROOMY)
    keys = placed(cluster, 0, 1, 2)
    cluster.node(0).crash()
    cluster.link("n0", "n1").cut(60.0)
    cluster.node(0).start()
    cluster.run_for(0.3)
    read(cluster, cluster.join(2), keys, "r")
    return cluster, 2


@provokes(MissReason.BEHIND_A_GAP)
def gap() -> tuple[Cluster, int]:
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    keys = prompt("p", 3)
    store(cluster, reader, keys[1:], 1)
    read(cluster, reader, keys, "r")
    return cluster, 0


@provokes(MissReason.LIMIT)
def session_limit() -> tuple[Cluster, int]:
    cluster = calm(1, **ROOMY | {"session_lease_share": 0.25})
    reader = cluster.join(0)
    keys = prompt("p", 5)
    store(cluster, reader, keys)
    read(cluster, reader, keys, "r")
    return cluster, 0


@provokes(MissReason.LOST)
def wrong_bytes() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    for key in keys:
        cluster.node(0).arena.flip(copies(cluster, key)[0].place, 0)
    read(cluster, reader, keys, "r")
    return cluster, 2


@provokes(MissReason.SKIPPED)
def released_unread() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    release(cluster, reader, match(cluster, reader, keys, "r").lease, 2)
    return cluster, 2


@provokes(MissReason.UNREPORTED)
def dead_engine() -> tuple[Cluster, int]:
    cluster, reader, keys = stored(2, **ROOMY)
    match(cluster, reader, keys, "r")
    reader.die()
    cluster.run_for(0.1)
    return cluster, 2


@pytest.mark.parametrize(("reason", "detail", "scene"), SCENES, ids=[scene.__name__ for _, _, scene in SCENES])
def test_a_cause_has_its_reason(reason: MissReason, detail: str, scene: Scene) -> None:
    """In the counters, and in the explanation of the request."""
    cluster, node = scene()
    found = missed(cluster.core(node).counters)
    assert found.pop(reason, 0) > 0, found
    assert found.keys() <= ({MissReason.EVICTED} if reason is MissReason.BEHIND_A_GAP else set())
    told = {each.reason: each.detail for each in explained(cluster, cluster.join(node), "r").missed}
    assert set(told) - ({MissReason.NEVER_STORED} if reason is MissReason.BEHIND_A_GAP else set()) == {reason}
    assert detail in told[reason]


def test_every_reason_is_provoked() -> None:
    # The next test provokes the last one.
    assert set(MissReason) - {reason for reason, _, _ in SCENES} == {MissReason.OTHER_LAYOUT}


def test_engines_of_another_layout() -> None:
    core, _ = local_core()
    core.handle(events.Joined(2, 1, "red", SLOT_BYTES // 2, 8, 256, 0, 0), 0.0)
    core.handle(events.Joined(3, 1, "blue", SLOT_BYTES, 8, 256, 0, 0), 0.0)
    keys = join_keys(prompt("turn 0 of other weights", KEYS))
    for connection in (1, 2, 3):
        core.handle(events.Requested(connection, engine.Match(1, keys, 0.0, False)), 10.0)
        core.handle(events.ProcessGone(connection), 10.0)
    assert missed(core.counters) == {"never_stored": KEYS * 256, "other_layout": KEYS * 256}
    assert missed(core.counters, "blue") == {"never_stored": KEYS * 256}


def test_tokens_behind_a_gap_have_the_cause_of_the_gap() -> None:
    cluster, _ = gap()
    counted = {at: tokens for at, tokens in cluster.core(0).counters.by_labels(MISSED).items() if tokens}
    assert counted == {
        ("red", "evicted", "evicted"): SIZE,
        ("red", "behind_a_gap", "evicted"): 2 * SIZE,
    }


def test_all_series_of_a_tenant_exist_from_its_first_session() -> None:
    cluster = calm(1)
    cluster.join(0)
    cluster.run_for(0.05)
    series = cluster.core(0).counters.by_labels(MISSED)
    assert set(series.values()) == {0}
    assert {reason for _, reason, _ in series} == set(MissReason)
    assert len(series) == len(MissReason) - 1 + len(GAPS)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 32))
def test_hits_and_misses_are_what_was_asked_for(seed: int) -> None:
    cluster = Cluster(3, seed)
    random = cluster.clock.random
    for number in range(4):
        cluster.join(number % 3, ("red", "blue")[number % 2])
    cluster.run_for(0.1)
    for _ in range(40):
        actor = random.choice(cluster.engines)
        keys = random.choice(PROMPTS)[: random.randrange(1, 6)]
        if random.random() < 0.5:
            actor.store(keys, 0, Storing())
        else:
            took = random.randrange(100), random.randrange(100), 0.01
            how = Reading(
                fetch=random.random() < 0.7,
                hold_s=0.01,
                independent=random.random() < 0.25,
                split=random.randrange(3),
                took=(min(took[:2]), max(took[:2]), 0.01) if random.random() < 0.5 else None,
            )
            actor.read(keys, how)
        cluster.check()
        if random.random() < 0.05:
            cluster.node(random.randrange(3)).freeze()
        cluster.run_for(random.choice((0.001, 0.02, 0.1)))
        if random.random() < 0.2:
            for node in cluster.nodes.values():
                node.thaw()
    for node in cluster.nodes.values():
        node.thaw()
    cluster.settle()
    cluster.check()
