"""The death of a directory node hides almost nothing: the segments whose owners live are found within two seconds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.arena import SLOTS
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, Reading, Storing
from tests.sim.prompts import prompt
from tokenlake.identity import SegmentKey
from tokenlake.memory import State
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys

pytestmark = pytest.mark.slow

NODES, OWNERS = 5, 4
PROMPTS, LENGTH = 50, 16
"""Prompts that each owner stores, and their segments."""
WITHIN_S = 2.0
FOUND_SHARE = 0.999


def stored(cluster: Cluster, owners: Sequence[Engine]) -> list[tuple[SegmentKey, int]]:
    """Fill the nodes of `owners`. Each segment, and the node that owns it."""
    for number in range(PROMPTS):
        for node, owner in enumerate(owners):
            owner.store(prompt(f"{node} {number}", LENGTH), 0, Storing())
        cluster.run_for(0.05)
    cluster.run_for(0.5)
    found = []
    for node in range(len(owners)):
        ready = [each for each in cluster.core(node).store.segments() if each.state is State.READY]
        assert all(segment.owned for segment in ready)
        found += [(segment.key, node) for segment in ready]
    return found


@pytest.mark.parametrize("fault", ["crash", "freeze"])
def test_the_death_of_a_directory_node_hides_almost_nothing(fault: str) -> None:
    """Of a node that owns none of the segments and is the directory node of a fifth of them. Each segment is matched by
    itself, at a node that does not own it, so that no neighbour leads to its owner."""
    # No node counts as full, so that nothing is handed over to the node without segments.
    regions = 5 * PROMPTS * LENGTH // (4 * SLOTS) + 20
    cluster = Cluster(NODES, regions=regions, dirty_share=1.0, session_reserve_share=1.0)
    cluster.calm()
    cluster.run_for(0.3)
    owners = [cluster.join(node) for node in range(OWNERS)]
    cluster.run_for(0.05)
    owned = stored(cluster, owners)
    assert len(owned) == OWNERS * PROMPTS * LENGTH
    dead = cluster.node(NODES - 1)
    keys = join_keys(key for key, _ in owned)
    hidden = sum(first == dead.name for first, _ in cluster.core(0).ring.candidates(keys))
    assert hidden > 0.1 * len(owned)
    if fault == "crash":
        dead.crash()
    else:
        dead.freeze()
    cluster.run_for(WITHIN_S)
    found = 0
    for number, (key, owner) in enumerate(owned):
        reader = owners[(owner + 1 + number % (OWNERS - 1)) % OWNERS]
        reader.answers.clear()
        reader.read([key], Reading(fetch=False, hold_s=0.001))
        cluster.run_for(0.010)
        found += [answer.codes for answer in reader.answers] == [bytes([Code.REMOTE])]
    assert found >= FOUND_SHARE * len(owned), f"{len(owned) - found} of {len(owned)} segments are hidden"
    cluster.check()
