"""Plans carried out at real query engines: attention over the part of the prefix that is used, whichever way it is."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.query.scene import HEADS, LAYOUT, SCALE, Text, serving, spread
from tests.query.test_attention import check
from tests.robustness.live import SEGMENT_TOKENS
from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId
from tokenlake.planner import Decision, PrefixTree, QueryPlan, Request, TransferPlan, Way
from tokenlake_client import Pool
from tokenlake_client.control import ControlPlane
from tokenlake_client.plans import new_cache, open_views
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

SHAPE = AttentionShape.of(LAYOUT, HEADS, SCALE)
INSTANCES = {f"i{number}": NodeId(f"node{number}") for number in range(3)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving(3) as cluster:
        yield cluster


def ask(pool: Pool, text: Text) -> Request:
    """Its last segment has the token that is always computed."""
    keys = tuple(pool.prefix(text.tokens).keys)
    return Request(name="r", keys=keys, tokens=len(text.tokens) + 1, answer_tokens=4)


def used(text: Text, segments: int) -> Text:
    """The beginning of a text."""
    cut = Text(0, 0)
    cut.tokens, cut.segments = text.tokens[: segments * SEGMENT_TOKENS], segments
    return cut


def drawn_plan(tree: PrefixTree, node: str, draw: random.Random) -> QueryPlan:
    """Any way for each run, as long as nothing is used behind what is recomputed."""
    decisions: list[Decision] = []
    given_up: set[int] = set()
    for index, run in enumerate(tree.runs):
        here = node in run.owners
        way = draw.choice([Way.LOCAL] if here else [Way.FETCH, Way.SHIP, Way.SHIP, Way.RECOMPUTE])
        if run.parent in given_up:
            way = Way.RECOMPUTE
        if way is Way.RECOMPUTE:
            given_up.add(index)
        owner = None if way is Way.RECOMPUTE else run.owners[0]
        decisions.append(Decision(index, way, owner, run.requests))
    return QueryPlan(NodeId(node), tuple(decisions), 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_plan_attention_is_over_what_it_uses(cluster: Cluster, seed: int) -> None:
    head = Text(1000 * seed, 3)
    texts = [Text(1000 * seed + number, 4, shared=head) for number in (1, 2, 3)]
    spread(cluster, texts)
    with cluster.connect(0, LAYOUT) as pool, ControlPlane(pool, INSTANCES, SHAPE) as plane:
        tree = plane.get_prefix_tree([ask(pool, text) for text in texts])
        assert tree.hit_tokens == (7 * SEGMENT_TOKENS,) * 3
        plan = drawn_plan(tree, "node0", random.Random(seed))
        expected = {
            index: sum(
                len(tree.runs[decision.run].keys)
                for decision in plan.decisions
                if index in decision.requests and decision.way is not Way.RECOMPUTE
            )
            for index in range(3)
        }
        views = open_views(pool, plan, tree, HEADS, SCALE)
        assert {index: view.hits for index, view in views.items()} == {i: n for i, n in expected.items() if n}
        fetched = any(decision.way is Way.FETCH for decision in plan.decisions)
        shipped = any(decision.way is Way.SHIP for decision in plan.decisions)
        if views:
            parts = [(view, used(texts[index], view.hits), 1 + index) for index, view in views.items()]
            moved = check(pool, parts)
            assert bool(moved) == shipped or fetched
        for view in views.values():
            view.close()


def test_a_stale_plan_uses_less(cluster: Cluster) -> None:
    text = Text(77, 4)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, ControlPlane(pool, INSTANCES, SHAPE) as plane:
        unknown = ask(pool, Text(78, 4))
        tree = plane.get_prefix_tree([ask(pool, text)])
        plan = plane.gen_plans([[0]], [1], tree, ["i0"]).query_plans[0]
        stale = PrefixTree([unknown], tree.segment_tokens, tree.runs)
        assert open_views(pool, plan, stale, HEADS, SCALE) == {}
        views = open_views(pool, plan, tree, HEADS, SCALE)
        check(pool, [(views[0], text, 2)])
        views[0].close()


def test_the_new_cache_of_a_plan() -> None:
    requests = [Request(name="r", keys=tuple(bytes([n]) * 32 for n in range(4)), tokens=64)]  # type: ignore[misc]
    tree = PrefixTree(requests, 16, ())
    plan = TransferPlan(NodeId("node0"), ((0, 1, 3),))
    assert new_cache(plan, tree) == [(requests[0].keys[1:4], 1)]
