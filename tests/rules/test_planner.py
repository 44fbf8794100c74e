"""The prefix tree, the cost of each way, and plans."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import (
    Batch,
    Costs,
    Model,
    PrefixTree,
    Rates,
    Request,
    SegmentSequence,
    TransferFit,
    Way,
    cache_load,
    choose,
    gen_plans,
    grow,
)

choosing = sys.modules["tokenlake.planner.choose"]
"""The module: as an attribute of the package, its name is a function."""

MODEL = Model(layers=4, segment_bytes=1 << 20, query_bytes=1 << 12)
TOKENS = 16
A, B, C, D = (NodeId(name) for name in "abcd")


def key(name: str) -> SegmentKey:
    return SegmentKey(name.encode())


def request(names: str, tokens: int | None = None, answer: int | None = 4) -> Request:
    """A request whose prompt has one segment per letter of `names`."""
    keys = tuple(key(names[: index + 1]) for index in range(len(names)))
    return Request(
        name=names, keys=keys, tokens=TOKENS * len(names) + 5 if tokens is None else tokens, answer_tokens=answer
    )


def rates(prefills: bool = True) -> Rates:
    made = Rates()
    for new in range(100, 900, 100) if prefills else ():
        made.prefill.add(new, 0, 1e-3 + 2e-4 * new + 1e-8 * new * new / 2, 0.0)
    return made


def link(of: Rates, node: NodeId, round_trip_s: float, bytes_per_s: float) -> None:
    """Set the rates of the network to `node`."""
    of.peer(node).fetch = TransferFit(round_trip_s, 1 / bytes_per_s)
    _, _, *of_work = of.peer(node).queries.coefficients
    of.peer(node).queries.give((round_trip_s, 1 / bytes_per_s, *of_work), known=False)


def everything(requests: Sequence[Request], *nodes: NodeId) -> dict[SegmentKey, tuple[NodeId, ...]]:
    return {each: nodes for made in requests for each in made.keys}


# -- the tree


def test_a_tree_of_shared_and_private_sequences() -> None:
    requests = [request("abc"), request("abd"), request("x"), request("ab")]
    owners = everything(requests, A)
    owners[key("abc")] = (B, A)
    del owners[key("x")]
    tree = grow(requests, owners, TOKENS)
    assert tree.sequences == (
        SegmentSequence(-1, (key("a"), key("ab")), (A,), (0, 1, 3)),
        SegmentSequence(0, (key("abc"),), (B, A), (0,)),
        SegmentSequence(0, (key("abd"),), (A,), (1,)),
    )
    assert tree.hit_tokens == (48, 48, 0, 32)
    assert tree.starts == (0, 32, 32)
    assert tree.slots() == {A: 4, B: 1}


def test_a_prefix_ends_at_the_first_gap_or_last_token() -> None:
    whole = request("abcd")
    assert grow([whole], {**everything([whole], A), key("abc"): ()}, TOKENS).hit_tokens == (32,)
    assert grow([request("ab", tokens=32)], everything([whole], A), TOKENS).hit_tokens == (16,)


def test_segments_on_disk_are_a_sequence_of_their_own() -> None:
    whole = request("abcd")
    tree = grow([whole], everything([whole], A), TOKENS, {key("abc"): 0.1, key("abcd"): 0.2})
    assert [(len(each.keys), each.disk_s) for each in tree.sequences] == [(2, 0.0), (2, pytest.approx(0.3))]


# -- ways


def cost_of(costs: Costs, tree: PrefixTree, ways: Sequence[tuple[Way, NodeId | None]]) -> float | None:
    """Cost of one way per sequence; None where the combination is impossible. Computed independently of `choose`."""
    total = 0.0
    shipped = set()
    for sequence, (way, owner) in enumerate(ways):
        parent = tree.sequences[sequence].parent
        if parent >= 0 and ways[parent][0] is Way.RECOMPUTE:
            if way is not Way.RECOMPUTE:
                return None
            total += costs.attention(sequence)
        elif way is Way.RECOMPUTE:
            total += costs.recompute(sequence) + costs.attention(sequence)
        elif way is Way.LOCAL:
            total += costs.local(sequence)
        elif way is Way.FETCH:
            assert owner is not None
            total += costs.fetch(sequence, owner) + costs.local(sequence)
        else:
            assert owner is not None
            shipped.add(owner)
            total += costs.ship(sequence, owner)
    return total + sum(costs.round_trips(owner) for owner in shipped)


def all_ways(costs: Costs, sequence: SegmentSequence) -> list[tuple[Way, NodeId | None]]:
    ways: list[tuple[Way, NodeId | None]] = []
    for owner in sequence.owners:
        ways += [(Way.LOCAL, owner)] if owner == costs.node else [(Way.FETCH, owner), (Way.SHIP, owner)]
    if not costs.rates.prefill.known:
        return [(way, owner) for way, owner in ways if way is not Way.SHIP]
    return [*ways, (Way.RECOMPUTE, None)]


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_chosen_ways_cost_what_brute_force_finds(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
    requests = [request(text, answer=data.draw(st.integers(0, 300))) for text in prompts]
    known = rates(prefills=data.draw(st.booleans()))
    for node in (B, C, D):
        peer = known.peer(node)
        link(
            known,
            node,
            data.draw(st.sampled_from([1e-5, 1e-3])),
            data.draw(st.sampled_from([1e8, 1e9, 1e10])),
        )
        peer.open_s.add(data.draw(st.sampled_from([0.0, 1e-2])))
    where = st.lists(st.sampled_from([A, B, C, D]), min_size=1, max_size=2, unique=True).map(tuple)
    owners = {each: data.draw(where) for made in requests for each in made.keys}
    tree = grow(requests, owners, TOKENS)
    costs = Costs(tree, Batch(tree, range(len(requests)), known), A, MODEL, known)
    assume(len(tree.sequences) <= 5)
    decisions, seconds = choose(costs)
    chosen = cost_of(costs, tree, [(each.way, each.owner) for each in decisions])
    assert chosen == pytest.approx(seconds)
    every = itertools.product(*(all_ways(costs, sequence) for sequence in tree.sequences))
    tried = [cost_of(costs, tree, ways) for ways in every]
    assert seconds == pytest.approx(min(cost for cost in tried if cost is not None))


def decide(made: Rates, requests: Sequence[Request], owner: NodeId) -> list[Way]:
    tree = grow(requests, everything(requests, owner), TOKENS)
    decisions, _ = choose(Costs(tree, Batch(tree, range(len(requests)), made), A, MODEL, made))
    return [each.way for each in decisions]


def test_link_speed_and_answer_length_decide_the_way() -> None:
    made = rates()
    link(made, B, 400e-6, 1e6)
    assert decide(made, [request("abcdefgh")], B) == [Way.RECOMPUTE]
    made = rates()
    link(made, B, 2e-5, 1e8)
    made.peer(B).open_s.add(1e-3)
    assert decide(made, [request("abcdefgh", answer=0)], B) == [Way.SHIP]
    assert decide(made, [request("abcdefgh", answer=3000)], B) in ([Way.FETCH], [Way.RECOMPUTE])


def test_the_number_of_tried_peer_sets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of sets bounds the time of a plan, for any number of owners."""
    tried: list[tuple[NodeId, ...]] = []
    best = choosing._best

    def noted(costs: Costs, options: Any, asked: tuple[NodeId, ...]) -> Any:
        tried.append(asked)
        return best(costs, options, asked)

    monkeypatch.setattr(choosing, "_best", noted)
    made = rates()
    long = request("abcdefghij")
    owners = {each: (NodeId(f"n{index}"),) for index, each in enumerate(long.keys)}
    for (node,) in owners.values():
        made.peer(node).fetch = TransferFit(1.0, 1.0)
        made.peer(node).queries.give((1e-6, 1e-12, 0.0, 0.0), known=False)
    tree = grow([long], owners, TOKENS)
    choose(Costs(tree, Batch(tree, [0], made), A, MODEL, made))
    assert len(tree.sequences) == 10
    assert len(tried) == len(set(tried)) == 2**choosing.MANY_PEERS


def test_many_readers_share_one_fetch() -> None:
    """A single reader ships its queries; many readers fetch the segments."""
    made = rates()
    link(made, B, 1e-5, 1e9)
    made.peer(B).open_s.add(0.0)
    made.decode.give((0.0, 0.0, 1e-8), known=False)
    alone = request("abcd", tokens=80, answer=20)
    assert decide(made, [alone], B) == [Way.SHIP]
    assert decide(made, [alone] * 60, B) == [Way.FETCH]


# -- plans


def test_batches_go_where_their_prefix_is() -> None:
    requests = [request("abcd"), request("efgh"), request("ijkl")]
    owners = {**everything(requests[:1], C), **everything(requests[1:2], A), **everything(requests[2:], B)}
    tree = grow(requests, owners, TOKENS)
    plans = gen_plans([[0], [1], [2]], [1, 1, 1], tree, {"i0": A, "i1": B, "i2": C}, MODEL, rates())
    assert plans.groups == (("i2",), ("i0",), ("i1",))
    assert [plan.node for plan in plans.query_plans] == [C, A, B]
    assert all(decision.way is Way.LOCAL for plan in plans.query_plans for decision in plan.decisions)


def test_a_group_has_as_many_instances_as_its_degree() -> None:
    requests = [request("abcd"), request("efgh")]
    tree = grow(requests, everything(requests, B), TOKENS)
    instances = {"i0": A, "i1": B, "i2": A, "i3": B, "i4": A}
    plans = gen_plans([[0], [1]], [1, 3], tree, instances, MODEL, rates())
    assert [len(group) for group in plans.groups] == [1, 3]
    assert len({name for group in plans.groups for name in group}) == 4
    assert {"i1", "i3"} <= {name for group in plans.groups for name in group}
    assert plans.query_plans[1].node == instances[plans.groups[1][0]]


def test_new_cache_begins_behind_what_is_cached() -> None:
    requests = [request("abcd"), request("ef")]
    tree = grow(requests, {key("a"): (A,), key("ab"): (B,)}, TOKENS)
    plans = gen_plans([[0, 1]], [1], tree, {"i0": A}, MODEL, rates())
    assert plans.transfer_plans[0].segments == ((0, 2, 2), (1, 0, 2))


@pytest.mark.parametrize(
    ("batches", "dops", "match"),
    [
        ([[0], [1]], [1, 2], "instances"),
        ([[0], [0]], [1, 1], "two batches"),
        ([[0]], [0], "degrees"),
        ([[7]], [1], "batch"),
    ],
)
def test_impossible_plans_are_refused(batches: list[list[int]], dops: list[int], match: str) -> None:
    requests = [request("ab"), request("cd")]
    tree = grow(requests, everything(requests, A), TOKENS)
    with pytest.raises(ValueError, match=match):
        gen_plans(batches, dops, tree, {"i0": A, "i1": B}, MODEL, rates())


# -- load


def test_cache_load_is_the_share_of_attention_time() -> None:
    requests = [request("abcd"), request("ab"), request("xy")]
    owners = {**everything(requests[:2], B), **everything(requests[2:], C)}
    tree = grow(requests, owners, TOKENS)
    made = rates()
    load = cache_load([0, 1, 2], tree, {"i0": A, "i1": B}, MODEL.layers, made)
    of = made.peer(B).queries
    spent = MODEL.layers * (of.seconds(2, 5 + 5, 0, 32) + of.seconds(1, 5, 0, 32))
    least = 3 * made.prefill.seconds(5, 0) / 2
    assert load == {A: 0.0, B: pytest.approx(spent / (spent + least)), C: pytest.approx(load[C])}
    assert 0 < load[C] < load[B] < 1
    assert cache_load([0], tree, {"i0": A}, MODEL.layers, Rates()) == {A: 0.0, B: 1.0}


# -- measurements


def test_prefill_fit_finds_the_coefficients() -> None:
    made = rates().prefill
    assert made.seconds(1000, 4000) == pytest.approx(1e-3 + 0.2 + 1e-8 * 1000 * 4500, rel=1e-3)


def test_prefill_fit_has_no_negative_coefficient() -> None:
    made = Rates().prefill
    for new in range(10, 200, 10):
        made.add(new, 1000 - new, 1.0 - new / 1000, 0.0)
    assert made.seconds(5000, 0) >= made.seconds(100, 0) >= 0


def test_old_samples_are_dropped_for_enough_newer_ones() -> None:
    fit = TransferFit(0.0, 0.0)
    for at in range(64):
        fit.add(1000 * at, 1e-3 + 1e-6 * at, at)
    for at in range(7):
        fit.add(1000 * at, 1e-3 + 9e-6 * at, 1000.0 + at)
    assert fit.seconds(100_000) < 1e-3 + 300e-6
    fit.add(8000, 1e-3 + 72e-6, 1007.0)
    assert fit.seconds(100_000) == pytest.approx(1e-3 + 900e-6)


def test_an_outlier_moves_a_fit_little() -> None:
    fit = TransferFit(0.0, 0.0)
    for at in range(20):
        fit.add(1000 * at, (1e-3 + 1e-6 * at) * (1.01 if at % 2 else 0.99), at)
    fit.add(10_000, 1.0, 20.0)
    assert fit.seconds(10_000) == pytest.approx(1.01e-3, rel=0.05)


@pytest.mark.parametrize(("segment_s", "way"), [(1e-6, Way.FETCH), (1.0, Way.RECOMPUTE)])
@pytest.mark.parametrize("node", [A, B])
def test_a_fast_disk_is_read_and_a_slow_one_is_not(segment_s: float, way: Way, node: NodeId) -> None:
    """The disk is that of the batch's node A, or of another one."""
    whole = request("abcdefghijklmnop")
    measured = rates()
    link(measured, B, 1e-4, 1e11)
    tree = grow([whole], everything([whole], node), TOKENS, dict.fromkeys(whole.keys, segment_s))
    decisions, seconds = choose(Costs(tree, Batch(tree, [0], measured), A, MODEL, measured), ship=False)
    assert [(each.way, each.owner) for each in decisions] == [(way, None if way is Way.RECOMPUTE else node)]
    memory = grow([whole], everything([whole], node), TOKENS)
    without = choose(Costs(memory, Batch(memory, [0], measured), A, MODEL, measured), ship=False)[1]
    if way is Way.FETCH:
        assert seconds == pytest.approx(without + 16 * segment_s)
    else:
        assert without < seconds < 16 * segment_s
