"""Where there are many nodes a match asks about some keys first: what it finds, and how many it asks."""

from __future__ import annotations

import pytest

from tests.core.scenes import calm, match, said, store
from tests.sim.prompts import prompt
from tokenlake.core.match import MANY_NODES
from tokenlake.wire import Code, peer

LENGTH = 24
SLOTS = {"regions": 8, "dirty_share": 1.0, "session_reserve_share": 1.0}


@pytest.mark.parametrize("here", [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 23, LENGTH])
def test_it_finds_as_far_as_there_is_something(here: int) -> None:
    """From one segment on the next is missing; what lies behind one that is missing is no hit, even at a probe."""
    cluster = calm(MANY_NODES, **SLOTS)
    keys = prompt("p", LENGTH)
    writer, reader = cluster.join(0), cluster.join(1)
    for start in range(0, here, 4):
        store(cluster, writer, keys[start : min(start + 4, here)])
    if here + 1 < LENGTH:
        store(cluster, writer, keys[here + 1 :][:6])
    cluster.run_for(1.0)
    found = match(cluster, reader, keys)
    assert found.hits == here
    assert all(code in (Code.LOCAL, Code.REMOTE) for code in found.codes[:here])
    assert here == LENGTH or found.codes[here] == Code.MISSING


def test_a_prompt_that_nobody_has_costs_few_lookups() -> None:
    cluster = calm(MANY_NODES)
    reader = cluster.join(1)
    assert match(cluster, reader, prompt("nobody's", 64)).hits == 0
    # Of 64 keys those at 0, 1, 3, 7, 15, 31 and 63, each at two nodes.
    assert len(said(cluster, 1, peer.Lookup)) <= 14


def test_a_frozen_node_costs_one_deadline() -> None:
    cluster = calm(MANY_NODES, **SLOTS)
    keys = prompt("p", LENGTH)
    writer, reader = cluster.join(0), cluster.join(1)
    for start in range(0, LENGTH, 4):
        store(cluster, writer, keys[start : start + 4])
    cluster.run_for(1.0)
    pairs = cluster.core(1)._context.ring.candidates(b"".join(keys))
    frozen = next(
        int(directory_node.removeprefix("n")) for directory_node, _ in pairs if directory_node not in ("n0", "n1")
    )
    cluster.node(frozen).freeze()
    began = cluster.clock.now
    match(cluster, reader, keys)
    deadline_s = cluster.core(1).config.match_deadline_s
    assert cluster.clock.now - began < 2 * deadline_s
    began = cluster.clock.now
    match(cluster, reader, keys)
    assert cluster.clock.now - began < deadline_s


def test_two_rounds_have_one_deadline() -> None:
    """One node is silent in the first round, and there is another that only the second would ask."""
    cluster = calm(MANY_NODES, **SLOTS)
    candidates = cluster.core(1)._context.ring.candidates
    for number in range(100):
        keys = prompt(f"p{number}", LENGTH)
        asked = [set(pair) for pair in candidates(b"".join(keys))]
        first, silent = asked[0] | asked[1] | asked[3] | {"n0", "n1"}, asked[7] | asked[2]
        if not first & silent:
            break
    writer, reader = cluster.join(0), cluster.join(1)
    for start in range(0, LENGTH, 4):
        store(cluster, writer, keys[start : start + 4])
    cluster.run_for(1.0)
    for name in sorted(silent):
        cluster.node(int(name.removeprefix("n"))).freeze()
    began = cluster.clock.now
    found = match(cluster, reader, keys)
    assert cluster.clock.now - began < 1.25 * cluster.core(1).config.match_deadline_s
    assert found.hits == 2
    assert found.codes[2] == Code.UNKNOWN
