"""Regions that change hands between tenants."""

from __future__ import annotations

import collections

import pytest

from tests.core.scenes import ask, calm, match, placed, said, store
from tests.sim.arena import SLOTS
from tests.sim.prompts import prompt
from tokenlake.core.instructions import ReplaceRegion
from tokenlake.store import store as store_module
from tokenlake.wire import engine


def test_a_new_tenant_gets_a_region_without_engines() -> None:
    cluster = calm(regions=2)
    red = cluster.join(0)
    store(cluster, red, placed(cluster, 0, 1, 3))
    while cluster.core(0).store.spare_regions:
        store(cluster, red, placed(cluster, 0, 1, 2, f"more {cluster.clock.now}"))
    red.die()
    cluster.run_for(0.01)
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(0.05)
    assert len(said(cluster, 0, ReplaceRegion)) == 1
    keys = placed(cluster, 0, 1)
    store(cluster, blue, keys)
    assert match(cluster, blue, keys).hits == 1
    assert not ask(red.processes[0], engine.Heartbeat)


def test_one_region_is_taken_from_one_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: a region is emptied in slices, and each slice evicted segments of all tenants without engines."""
    monkeypatch.setattr(store_module, "RECLAIM_EVICTIONS", 1)
    cluster = calm(1, regions=3, dirty_share=1.0, session_reserve_share=1.0)
    former = [cluster.join(0, tenant=tenant) for tenant in ("red", "blue", "grey")]
    for each in former:
        store(cluster, each, prompt("kept", SLOTS))
        each.die()
    cluster.run_for(0.01)
    newcomer = cluster.join(0, tenant="green")
    cluster.run_for(2.0)
    assert len(said(cluster, 0, ReplaceRegion)) == 1
    left = collections.Counter(segment.tenant for segment in cluster.core(0).store.segments())
    assert list(left.values()) == [SLOTS, SLOTS]
    store(cluster, newcomer, prompt("new", 1))
    assert match(cluster, newcomer, prompt("new", 1)).hits == 1
