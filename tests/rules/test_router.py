"""Where a request starts soonest: prompts that wait, segments in flight, and segments that have to be brought."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.test_planner import MODEL, TOKENS, A, B, C, everything, key, rates, request
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Request, Router, gen_plans, grow

ANSWER = 10
"""Expected tokens of an answer: fewer than a segment has."""
INSTANCES = {"i0": A, "i1": B, "i2": C, "i3": A}
SEGMENT_BYTES = MODEL.segment_bytes


def router(measured: bool = False, seed: int = 0) -> Router:
    given_rates = rates(measured)
    given_rates.answer_tokens.add(ANSWER)
    return Router(INSTANCES, TOKENS, SEGMENT_BYTES, given_rates, seed)


def named(prompt: Request, name: str) -> Request:
    return Request(name=name, keys=prompt.keys, tokens=prompt.tokens, answer_tokens=prompt.answer_tokens)


def naive(
    asked: Request, owners: Mapping[SegmentKey, Collection[NodeId]], sent: Mapping[str, tuple[Request, str]]
) -> dict[str, tuple[int, int]]:
    """(new, moved) tokens per instance, segment by segment. `sent`: the requests under way and their instances."""
    found = {}
    usable = asked.keys[: (asked.tokens - 1) // TOKENS]
    for instance, node in INSTANCES.items():
        flying = {
            each for other, at in sent.values() if at == instance for each in other.keys[: (other.tokens - 1) // TOKENS]
        }
        cached = moved = 0
        in_pool = True
        for each in usable:
            in_pool = in_pool and bool(owners.get(each))
            if not in_pool and each not in flying:
                break
            cached += 1
            moved += in_pool and each not in flying and node not in owners[each]
        found[instance] = max(1, asked.tokens - cached * TOKENS), moved * TOKENS
    return found


prompts = st.text("ab", min_size=0, max_size=5)
nodes = st.frozensets(st.sampled_from([A, B, C, NodeId("away")]), max_size=3)


@given(
    prompts,
    st.dictionaries(prompts.filter(bool), nodes),
    st.lists(st.tuples(prompts, st.sampled_from(sorted(INSTANCES)), st.sampled_from(["sent", "first", "finished"]))),
    st.booleans(),
)
def test_starts_equal_a_count_segment_by_segment(
    names: str, known: dict[str, frozenset[NodeId]], history: list[tuple[str, str, str]], exact: bool
) -> None:
    made, under_way, queued = router(), {}, dict.fromkeys(INSTANCES, 0.0)
    for number, (text, instance, state) in enumerate(history):
        other = named(request(text), str(number))
        (start,) = made.starts(other, {}, [instance])
        made.sent(other, start)
        if state == "sent":
            queued[instance] += start.prefill.new + 0.1 * start.prefill.prefix
        if state != "finished":
            under_way[other.name] = other, instance
            queued[instance] += ANSWER
        if state == "first":
            made.first_token(other.name)
        elif state == "finished":
            made.finished(other.name)
        made.check_integrity()
    # Exactly full segments: the last one is never part of a prefix.
    asked = request(names, TOKENS * len(names)) if exact and names else request(names)
    owners = {key(name): at for name, at in known.items()}
    expected = naive(asked, owners, under_way)
    starts = {start.instance: start for start in made.starts(asked, owners)}
    assert {name: (start.prefill.new, start.moved) for name, start in starts.items()} == expected
    cached = {name: start.prefill.prefix for name, start in starts.items()}
    assert {name: start.cost for name, start in starts.items()} == {
        name: pytest.approx(queued[name] + new + made.copy_price * (moved + max(cached.values()) - cached[name]))
        for name, (new, moved) in expected.items()
    }
    least = min(start.cost for start in starts.values())
    assert made.where(asked, owners).cost == least
    assert made.where(asked, owners, ["i2"]).instance == "i2"


@pytest.mark.parametrize("measured", [False, True])
def test_among_equal_instances_the_nearest_one_is_chosen(measured: bool) -> None:
    """The prefix is brought to an idle instance in its domain, as long as an instance elsewhere does not start clearly
    sooner; a plan chooses in the same way."""
    made, short = router(measured), request("abcd")
    made.locations = {A: ("rack-1", "x"), B: ("rack-2", "x"), C: ("rack-2", "y")}
    owners = everything([short], B)
    blind = {start.instance: start for start in router(measured).starts(short, owners)}
    near = {start.instance: start for start in made.starts(short, owners)}
    assert near["i1"] == blind["i1"]
    assert blind["i0"].cost == blind["i2"].cost < near["i2"].cost < near["i0"].cost
    long = named(request("x" * 20), "long")
    made.sent(long, made.starts(long, {}, ["i1"])[0])
    assert {made.where(short, owners).instance for _ in range(9)} == {"i2"}
    plan = gen_plans([[0]], [1], grow((short,), owners, TOKENS), INSTANCES, MODEL, rates(measured), made)
    assert plan.groups == (("i2",),)
    # A node in the instance's domain may have a copy of what another domain owns.
    both = {each: {*nodes, A} for each, nodes in owners.items()}
    assert {made.where(short, both, ["i2", "i3"]).instance for _ in range(9)} == {"i3"}
    for number in range(2):
        made.sent(named(request("y" * 20), str(number)), made.starts(request("y" * 20), {}, ["i2"])[0])
    assert made.where(short, owners).instance in ("i0", "i3")


def test_a_request_waits_for_another_one() -> None:
    """Computing it again at an idle instance takes as long as waiting for it."""
    made = router()
    first, second = (named(request("abcdefgh" + last), last) for last in "xy")
    start = made.where(first, {})
    made.sent(first, start)
    following = made.where(second, {})
    assert following.instance == start.instance
    assert following.prefill.new == TOKENS + 5
    # Behind several of them it would wait for longer.
    for number in range(20):
        made.sent(named(request("z" * 9), str(number)), made.starts(request("z" * 9), {}, [start.instance])[0])
    idle = made.where(second, {})
    assert idle.instance != start.instance
    assert (idle.prefill.new, idle.repeated) == (second.tokens, 8 * TOKENS)


def test_a_copy_costs_more_under_load() -> None:
    """With half of the instances busy a copy costs twice its tokens, and with all of them as much as it may."""
    made, asked = router(), request("abcd")
    owners = everything([asked], C)
    (idle,) = made.starts(asked, owners, ["i0"])
    assert idle.cost == idle.prefill.new + 4 * TOKENS

    def keep_busy(instances: Collection[str]) -> None:
        for instance in instances:
            made.sent(named(request("x"), instance), made.starts(request("x"), {}, [instance])[0])
        for number in range(1_000):
            answered = named(request("y"), str(number))
            made.sent(answered, made.starts(answered, {}, ["i2"])[0])
            made.finished(answered.name)

    keep_busy(["i1", "i3"])
    assert made.copy_price == pytest.approx(2, rel=0.01)
    (busy,) = made.starts(asked, owners, ["i0"])
    assert busy.cost == pytest.approx(busy.prefill.new + 2 * 4 * TOKENS, rel=0.01)
    keep_busy(INSTANCES)
    assert made.copy_price == 10


def test_measured_costs_are_seconds_of_prefill_and_transfer() -> None:
    made, asked = router(measured=True), request("abcd")
    fit = made.rates.prefill
    here, away = (made.starts(asked, everything([asked], at), ["i1"])[0] for at in (B, C))
    assert here.cost == pytest.approx(fit.seconds(5, 4 * TOKENS))
    assert away.cost == pytest.approx(here.cost + fit.seconds(4 * TOKENS, 0))
    link = made.rates.peer(C).fetch
    for count in range(1, 9):
        link.add(count << 20, 0.1 * count, 0.0)
    slow = made.starts(asked, everything([asked], C), ["i1"])[0]
    assert slow.cost == pytest.approx(away.cost + 0.4)


def test_equal_instances_are_drawn() -> None:
    made = router()
    chosen = {made.where(request("ab"), {}).instance for _ in range(100)}
    assert chosen == set(INSTANCES)
    first, second = ([each.where(request("ab"), {}).instance for _ in range(20)] for each in (router(), router()))
    assert first == second


def test_instances_come_and_go() -> None:
    made = router()
    prompt = request("abcd")
    made.sent(prompt, made.starts(prompt, {}, ["i1"])[0])
    made.leave("i1")
    made.check_integrity()
    assert not made.in_flight(key("a"))
    assert "i1" not in {start.instance for start in made.starts(prompt, {})}
    made.join("i1", NodeId("d"))
    made.first_token(prompt.name)
    made.finished(prompt.name)
    assert made.queued("i1") == 0
    assert made.where(prompt, everything([prompt], NodeId("d"))).instance == "i1"
    with pytest.raises(ValueError, match="no instance"):
        made.where(prompt, {}, [])


def test_a_request_that_is_sent_twice_counts_once() -> None:
    made, prompt = router(), request("abcd")
    for instance in ("i0", "i2"):
        made.sent(prompt, made.starts(prompt, {}, [instance])[0])
        made.check_integrity()
    assert (made.queued("i0"), made.queued("i2")) == (0, prompt.tokens + ANSWER)
    assert list(made.in_flight(key("a"))) == ["i2"]


# -- batches


@given(st.data())
def test_batches_have_the_least_sum_of_costs(data: st.DataObject) -> None:
    made = router()
    for number in range(data.draw(st.integers(0, 3))):
        other = named(request(data.draw(prompts)), f"other {number}")
        made.sent(other, made.starts(other, {}, [data.draw(st.sampled_from(sorted(INSTANCES)))])[0])
    requests = [request(data.draw(prompts, "prompt"), answer=10_000) for _ in range(data.draw(st.integers(1, 3)))]
    owners = {each: tuple(data.draw(nodes)) for made_ in requests for each in made_.keys}
    tree = grow(requests, owners, TOKENS)
    singles = [[index] for index in range(len(requests))]
    plans = gen_plans(singles, [1] * len(singles), tree, INSTANCES, MODEL, made.rates, made)
    costs = [{start.instance: start.cost for start in made.starts(each, tree.owners())} for each in requests]
    least = min(
        sum(cost[name] for cost, name in zip(costs, chosen, strict=True))
        for chosen in itertools.permutations(INSTANCES, len(requests))
    )
    assert sum(cost[group[0]] for cost, group in zip(costs, plans.groups, strict=True)) == pytest.approx(least)
    assert len({group[0] for group in plans.groups}) == len(requests)


def test_a_batch_follows_its_prefix_in_flight() -> None:
    made, ahead = router(), request("abcdefgh")
    made.sent(ahead, made.starts(ahead, {}, ["i2"])[0])
    requests = [request("abcdefghi"), request("abcdefghj")]
    tree = grow(requests, everything([request("abc")], A), TOKENS)
    for measured in (rates(False), rates()):
        made.rates = measured
        for prefix, other in (("abcdefgh", "abcdefgh"), ("abc", "xyz")):
            together = grow([request(prefix + "ij"), request(other + "kl")], tree.owners(), TOKENS)
            plans = gen_plans([[0, 1]], [1], together, INSTANCES, MODEL, measured, made)
            assert (plans.groups == (("i2",),)) is (prefix == other)
