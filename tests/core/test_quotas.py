"""Tenants side by side: who writes without end, who comes later, and who keeps what is its own."""

from __future__ import annotations

import pytest

from tests.core.scenes import calm, match, prepare, said, tell
from tests.sim.arena import SLOTS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Storing
from tests.sim.prompts import prompt
from tokenlake.core.instructions import ReplaceRegion
from tokenlake.core.regions import PATIENCE_S
from tokenlake.wire import Code, engine

ROOMY = {"dirty_share": 1.0, "session_reserve_share": 1.0, "session_lease_share": 1.0}


def regions(cluster: Cluster, tenant: str, node: int = 0) -> int:
    return sum(len(pool.regions) for pool in cluster.core(node).store.pools() if pool.tenant == tenant)


def write(cluster: Cluster, writer: Engine, name: str, segments: int) -> None:
    """One prompt of so many segments, a slot's worth at a time."""
    keys = prompt(name, segments)
    for first in range(0, segments, SLOTS):
        writer.store(keys[first : first + SLOTS], first, Storing())
        cluster.run_for(0.05)


def hits(cluster: Cluster, reader: Engine, name: str, segments: int) -> int:
    reply = match(cluster, reader, prompt(name, segments))
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, segments),)))
    return reply.hits


@pytest.mark.parametrize("quotas", [{"red": 0.5}, {}], ids=["quota", "none"])
def test_who_writes_without_end_takes_nothing_from_others(quotas: dict[str, float]) -> None:
    cluster = calm(1, regions=4, quotas=quotas, **ROOMY)
    red, blue = cluster.join(0), cluster.join(0, tenant="blue")
    write(cluster, blue, "kept", 2 * SLOTS)
    for turn in range(20):
        write(cluster, red, f"endless {turn}", SLOTS)
        if turn % 5 == 0:
            assert hits(cluster, blue, "kept", 2 * SLOTS) == 2 * SLOTS
        cluster.check()
    assert hits(cluster, blue, "kept", 2 * SLOTS) == 2 * SLOTS
    assert regions(cluster, "red") == 2


def test_who_comes_later_gets_its_part_of_what_another_uses() -> None:
    cluster = calm(1, regions=4, **ROOMY)
    red = cluster.join(0)
    write(cluster, red, "all", 4 * SLOTS)
    assert regions(cluster, "red") == 4
    blue = cluster.join(0, tenant="blue")
    for turn in range(12):
        write(cluster, red, f"endless {turn}", SLOTS)
        write(cluster, blue, f"mine {turn}", SLOTS)
        cluster.run_for(0.3)
        cluster.check()
    assert (regions(cluster, "red"), regions(cluster, "blue")) == (2, 2)
    # No more than that: a tenant with its fair part takes from nobody.
    assert len(said(cluster, 0, ReplaceRegion)) == 2
    assert hits(cluster, blue, "mine 11", SLOTS) == SLOTS


def test_a_lease_outlives_the_region_that_is_asked_back() -> None:
    cluster = calm(1, regions=1, **ROOMY)
    red = cluster.join(0)
    write(cluster, red, "read", SLOTS)
    lease = match(cluster, red, prompt("read", SLOTS))
    assert lease.hits == SLOTS
    cluster.join(0, tenant="blue")
    cluster.run_for(2.0)
    # The only region of a tenant that is here is its fair part.
    assert regions(cluster, "red") == 1
    assert not said(cluster, 0, ReplaceRegion)
    cluster.check()


def test_who_gives_nothing_back_does_not_keep_others_from_what_nobody_uses() -> None:
    cluster = calm(1, regions=4, **ROOMY)
    green = cluster.join(0, tenant="green")
    write(cluster, green, "kept", SLOTS)
    green.die()
    red = cluster.join(0)
    for region in range(3):
        write(cluster, red, f"leased {region}", SLOTS)
        assert match(cluster, red, prompt(f"leased {region}", SLOTS)).hits == SLOTS
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(2 * PATIENCE_S)
    assert (regions(cluster, "red"), regions(cluster, "blue"), regions(cluster, "green")) == (3, 1, 0)
    cluster.check()
    # What is asked back of who has too much still goes to who wanted it, as soon as it can.
    red.die()
    cluster.run_for(2 * PATIENCE_S)
    assert regions(cluster, "blue") == 2
    write(cluster, blue, "mine", SLOTS)
    cluster.check()


def test_a_push_finds_memory_where_another_tenant_had_all() -> None:
    """Nobody of the tenant is on the node that is to keep its segments."""
    cluster = calm(2, regions=2, **ROOMY)
    reds = [cluster.join(node) for node in (0, 1)]
    for turn in range(4):
        for red in reds:
            write(cluster, red, f"{red.node.name} {turn}", 2 * SLOTS)
    for red in reds:
        red.die()
    blue = cluster.join(0, tenant="blue")
    cluster.run_for(1.0)
    for turn in range(6):
        write(cluster, blue, f"blue {turn}", SLOTS)
        cluster.run_for(0.5)
    assert regions(cluster, "blue", 1) >= 1
    cluster.check()


def test_the_reason_of_a_refusal_is_the_quota() -> None:
    cluster = calm(1, regions=4, quotas={"red": 0.25}, **ROOMY)
    red, blue = cluster.join(0), cluster.join(0, tenant="blue")
    write(cluster, red, "leased", SLOTS)
    assert match(cluster, red, prompt("leased", SLOTS)).hits == SLOTS
    assert prepare(cluster, red, prompt("refused", 2)).codes == bytes([Code.QUOTA] * 2)
    assert prepare(cluster, blue, prompt("refused", 2)).codes == bytes([Code.RESERVED] * 2)
