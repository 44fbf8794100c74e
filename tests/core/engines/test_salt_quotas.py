"""Quotas of salts: one account does not evict what the others of its tenant have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.core.scenes import ROOMY, answer, calm, copies, match, release, tell
from tests.sim.arena import SHARDS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tests.sim.prompts import prompt
from tokenlake.core.engines.pins import PINS_REFUSED
from tokenlake.core.engines.salt_quotas import TRIMMED
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.memory.removals import SALT_RULE
from tokenlake.wire import engine
from tokenlake.wire.slots import join_keys


def write(cluster: Cluster, writer: Engine, keys: Sequence[SegmentKey], account: str = "", **hints: Any) -> None:
    """Store segments of one prompt for an account."""
    process, said = writer.processes[0], Hints(account=account, **hints)
    prepared = answer(cluster, process, engine.Prepare, join_keys(list(keys)), 0, "", said)
    indices = tuple(range(len(keys)))
    answer(cluster, process, engine.Commit, prepared.write, indices, (1 << SHARDS) - 1, bytes(8 * SHARDS * len(keys)))
    cluster.run_for(0.01)
    cluster.check()


def quarter(**rules: Any) -> tuple[Cluster, Engine, int]:
    """A node whose tenant `red` has quotas of a quarter for each account; the segments that this is."""
    cluster = calm(1, regions=16, quotas={"red": 1.0}, salt_quotas={"red": 0.25}, **{**ROOMY, **rules})
    writer = cluster.join(0)
    write(cluster, writer, prompt("first", 1))
    (pool,) = cluster.core(0).store.pools()
    return cluster, writer, cluster.core(0).store.regions.quota(pool.tenant) // 4 // pool.slot_bytes


def here(cluster: Cluster, keys: Sequence[SegmentKey]) -> list[bool]:
    return [bool(copies(cluster, key)) for key in keys]


def test_an_account_evicts_its_own_segments() -> None:
    """The prompts that it used longest ago leave first, each from its end. Others keep theirs."""
    cluster, writer, most = quarter()
    other, old = prompt("other", 3), prompt("old", 3)
    write(cluster, writer, other, "b")
    write(cluster, writer, old, "a")
    used = prompt("used", most - 4)
    write(cluster, writer, used, "a")
    assert here(cluster, old) == [True] * 3
    found = match(cluster, writer, used)
    release(cluster, writer, found.lease, found.hits, read=True)
    write(cluster, writer, prompt("new", 3), "a")
    core = cluster.core(0)
    assert here(cluster, old) == [True, False, False]
    assert all(here(cluster, [*used, *other, *prompt("new", 3)]))
    assert core.counters[TRIMMED] == 2
    gone = core._context.removals.get(next(iter(core.store.pools())).tenant, old[2])
    assert gone is not None
    assert gone.rule == SALT_RULE


def test_a_prompt_longer_than_the_quota_keeps_its_beginning() -> None:
    cluster, writer, most = quarter()
    keys = prompt("long", most + 3)
    write(cluster, writer, keys, "a")
    assert here(cluster, keys) == [True] * most + [False] * 3
    write(cluster, writer, prompt("none", most + 3))
    assert all(here(cluster, prompt("none", most + 3))), "segments without an account have no quota"


def test_segments_in_use_stay() -> None:
    cluster, writer, most = quarter()
    keys = prompt("read", most)
    write(cluster, writer, keys, "a")
    lease = match(cluster, writer, keys)
    write(cluster, writer, prompt("more", 2), "a")
    assert all(here(cluster, keys))
    assert not any(here(cluster, prompt("more", 2)))
    release(cluster, writer, lease.lease, lease.hits, read=True)


def test_the_pins_of_an_account_are_bounded_by_its_quota() -> None:
    cluster, writer, most = quarter(pinned_share=0.5)
    keys = prompt("pinned", most)
    write(cluster, writer, keys, "a", pin_s=60.0)
    core = cluster.core(0)
    assert core.census()["pinned segments"] == most // 2
    assert core.counters[PINS_REFUSED] == most - most // 2
    write(cluster, writer, prompt("b", 2), "b", pin_s=60.0)
    assert core.census()["pinned segments"] == most // 2 + 2
    tell(cluster, writer.processes[0], engine.Unpin(join_keys(keys)))
    assert core.census()["pinned segments"] == 2
    cluster.check()


def test_no_account_is_kept_without_quotas() -> None:
    cluster = calm(1)
    write(cluster, cluster.join(0), prompt("p", 3), "a")
    assert cluster.core(0).census()["segments with quotas"] == 0
