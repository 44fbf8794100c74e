"""Plans carried out at real query engines: attention covers the used part of the prefix, in every way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.query.scene import DEADLINE_S, HEADS, LAYOUT, SCALE, Text, spread
from tests.query.test_attention import check
from tests.robustness.live import SEGMENT_TOKENS, wait_until
from tests.server.control.scene import local
from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId
from tokenlake.planner import Decision, PrefillFit, PrefixTree, QueryPlan, Request, TransferPlan, Way
from tokenlake.planner.fits import ENOUGH
from tokenlake_client import Lease, Pool
from tokenlake_client.control import ControlPlane
from tokenlake_client.plans import new_cache, open_views
from tokenlake_client.queries import View
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

SHAPE = AttentionShape.of(LAYOUT, HEADS, SCALE)
INSTANCES = {f"i{number}": NodeId(f"node{number}") for number in range(3)}


def ask(pool: Pool, text: Text) -> Request:
    """A request with one more token than its segments have: the last token is always computed."""
    keys = tuple(pool.prefix(text.tokens).keys)
    return Request(name="r", keys=keys, tokens=len(text.tokens) + 1, answer_tokens=4)


def used(text: Text, segments: int) -> Text:
    """The first `segments` segments of a text."""
    cut = Text(0, 0)
    cut.tokens, cut.segments = text.tokens[: segments * SEGMENT_TOKENS], segments
    return cut


def drawn_plan(tree: PrefixTree, node: str, draw: random.Random) -> QueryPlan:
    """A random way for each sequence; behind a recomputed one everything is recomputed."""
    decisions: list[Decision] = []
    recomputed: set[int] = set()
    for index, sequence in enumerate(tree.sequences):
        here = node in sequence.owners
        way = draw.choice([Way.LOCAL] if here else [Way.FETCH, Way.SHIP, Way.SHIP, Way.RECOMPUTE])
        if sequence.parent in recomputed:
            way = Way.RECOMPUTE
        if way is Way.RECOMPUTE:
            recomputed.add(index)
        owner = None if way is Way.RECOMPUTE else sequence.owners[0]
        decisions.append(Decision(index, way, owner, sequence.requests))
    return QueryPlan(NodeId(node), tuple(decisions), 0.0)


def open_all(pool: Pool, plan: QueryPlan, tree: PrefixTree, expected: dict[int, int]) -> dict[int, View]:
    """The views of a plan, retried until they cover the `expected` numbers of segments: a node that is late on a busy
    machine makes a view shorter."""
    views: dict[int, View] = {}

    def covered() -> bool:
        for view in views.values():
            view.close()
        views.clear()
        views.update(open_views(pool, plan, tree, HEADS, SCALE, DEADLINE_S))
        return {index: view.hits for index, view in views.items()} == expected

    wait_until(covered, f"views of {expected} segments by request")
    return views


def tree_of(plane: ControlPlane, pool: Pool, texts: Sequence[Text]) -> PrefixTree:
    """The prefix tree of whole texts, retried until every node has answered in time."""
    trees: list[PrefixTree] = []

    def whole() -> bool:
        trees.append(plane.get_prefix_tree([ask(pool, text) for text in texts]))
        return trees[-1].hit_tokens == tuple(text.segments * SEGMENT_TOKENS for text in texts)

    wait_until(whole, "a tree of the whole texts")
    return trees[-1]


@pytest.mark.parametrize("seed", range(6))
def test_attention_covers_what_the_plan_uses(cluster: Cluster, seed: int) -> None:
    head = Text(1000 * seed, 3)
    texts = [Text(1000 * seed + number, 4, shared=head) for number in (1, 2, 3)]
    spread(cluster, texts)
    with cluster.connect(0, LAYOUT) as pool, local(cluster.nodes[0]) as control:
        plane = ControlPlane(control, LAYOUT, INSTANCES, SHAPE)
        tree = tree_of(plane, pool, texts)
        assert tree.hit_tokens == (7 * SEGMENT_TOKENS,) * 3
        plan = drawn_plan(tree, "node0", random.Random(seed))
        expected = {
            index: sum(
                len(tree.sequences[decision.sequence].keys)
                for decision in plan.decisions
                if index in decision.requests and decision.way is not Way.RECOMPUTE
            )
            for index in range(3)
        }
        views = open_all(pool, plan, tree, {index: count for index, count in expected.items() if count})
        fetched = any(decision.way is Way.FETCH for decision in plan.decisions)
        shipped = any(decision.way is Way.SHIP for decision in plan.decisions)
        if views:
            parts = [(view, used(texts[index], view.hits), 1 + index) for index, view in views.items()]
            moved = check(pool, parts)
            assert bool(moved) == shipped or fetched
        for view in views.values():
            view.close()


def test_a_planned_fetch_lasts_half_its_prefill(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch of a plan lasts at most half as long as its prefill."""
    text = Text(79, 4)
    spread(cluster, [text])
    limits: list[float] = []
    original = Lease.fetch

    def fetch(lease: Lease, start: int, stop: int, *, at_most_s: float) -> Any:
        limits.append(at_most_s)
        return original(lease, start, stop, at_most_s=at_most_s)

    prefill = PrefillFit()
    for count in range(1, 1 + ENOUGH):
        prefill.add(64 * count, 0, 64.0 * count, 0.0)
    with cluster.connect(0, LAYOUT) as pool, local(cluster.nodes[0]) as control:
        plane = ControlPlane(control, LAYOUT, INSTANCES, SHAPE)
        tree = tree_of(plane, pool, [text])
        fetched = (
            Decision(index, Way.FETCH, each.owners[0], each.requests) for index, each in enumerate(tree.sequences)
        )
        plan = QueryPlan(NodeId("node0"), tuple(fetched), 0.0)
        monkeypatch.setattr(Lease, "fetch", fetch)
        halves = [tokens / 2 for tokens in tree.tokens]
        for measured, expected in ((None, [0.0] * len(halves)), (PrefillFit(), [0.0] * len(halves)), (prefill, halves)):
            limits.clear()
            for view in open_views(pool, plan, tree, HEADS, SCALE, DEADLINE_S, measured).values():
                view.close()
            assert limits == pytest.approx(expected, rel=0.01)


def test_a_stale_plan_covers_less(cluster: Cluster) -> None:
    text = Text(77, 4)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, local(cluster.nodes[0]) as control:
        plane = ControlPlane(control, LAYOUT, INSTANCES, SHAPE)
        unknown = ask(pool, Text(78, 4))
        tree = tree_of(plane, pool, [text])
        plan = plane.gen_plans([[0]], [1], tree, ["i0"]).query_plans[0]
        stale = PrefixTree([unknown], tree.segment_tokens, tree.sequences)
        assert open_views(pool, plan, stale, HEADS, SCALE) == {}
        views = open_all(pool, plan, tree, {0: text.segments})
        check(pool, [(views[0], text, 2)])
        views[0].close()


def test_the_new_cache_of_a_plan() -> None:
    requests = [Request(name="r", keys=tuple(bytes([n]) * 32 for n in range(4)), tokens=64)]  # type: ignore[misc]
    tree = PrefixTree(requests, 16, ())
    plan = TransferPlan(NodeId("node0"), ((0, 1, 3),))
    assert new_cache(plan, tree) == [(requests[0].keys[1:4], 1)]
