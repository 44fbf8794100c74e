"""Prefill and decode on different engines: the fields of the answer, the tail of the prompt, and the wait for it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import SEGMENT, TOKEN_S, Bench, blocks_of, load, prefill, request
from tests.rules.test_retention import Scene
from tokenlake.hints import NO_HINTS
from tokenlake.identity import SegmentKey
from tokenlake.memory import Kind
from tokenlake_client.engines.common.in_flight import FACTOR, LONGEST_S
from tokenlake_client.engines.vllm.disaggregated import (
    EXPECTED_S,
    LEAST_WAIT_S,
    MAX_KEYS,
    MAX_TAILS,
    NOT_SPLIT,
    READ,
    UNREAD,
    Offer,
    RemotePrefill,
    Split,
    TailRoom,
    has_tail,
    is_split,
    split_of,
)
from tokenlake_client.engines.vllm.request import RequestEnd
from tokenlake_client.engines.vllm.step_plan import LoadTime, SavePlan, StepReport

PREFILLS = Split(decodes_elsewhere=True)
LENGTH = RequestEnd(complete=True, stop_reason="length", output_tokens=1)
ABORT = RequestEnd(complete=False, stop_reason="abort", output_tokens=3)
PROMPTS = [2, 7, 8, 9, 10, 16, 17, 18, 27, 33, 100]


def keys_of(bench: Bench, tokens: list[int]) -> list[SegmentKey]:
    """The keys of a prompt, with that of its tail."""
    chain = bench.pool.prefix(tokens)
    full = len(chain.keys)
    tail = [chain.tail_key(full, tokens[full * SEGMENT :])] if has_tail(len(tokens), SEGMENT) else []
    return [*chain.keys, *tail]


def prompt_of(bench: Bench, tokens: int = 27) -> tuple[list[int], list[SegmentKey]]:
    """A prompt and its keys."""
    prompt = request(tokens).all_token_ids
    return prompt, keys_of(bench, prompt)


def begin(bench: Bench, one: FakeRequest) -> None:
    """A prompt that is to be computed for another engine gets its blocks."""
    assert bench.place(one, split=PREFILLS) == 0


def offered(
    bench: Bench, tokens: int, chunk: int = 1000, name: str = "p"
) -> tuple[FakeRequest, Offer | None, list[Any]]:
    """Compute a prompt for another engine. Returns the request, the offer and the saves."""
    one = request(tokens, name)
    begin(bench, one)
    saves: list[SavePlan] = []
    for computed in range(0, tokens, chunk):
        saves += bench.step(one, computed, min(chunk, tokens - computed)).saves
    one.all_token_ids.append(7)
    keep, offer = bench.side.finished(one, blocks_of(one), LENGTH)
    assert keep
    return one, offer, saves


def decodes(
    bench: Bench, tokens: list[int], keys: list[SegmentKey], seconds: float = 1.0, name: str = "d"
) -> FakeRequest:
    one = FakeRequest(name, list(tokens))
    said = RemotePrefill(tuple(key.hex() for key in keys), seconds)
    bench.side.new_request(one, split=Split(prefill=said))
    return one


# -- the fields


def test_the_fields_of_an_answer_are_those_of_a_request() -> None:
    offer = Offer((SegmentKey(bytes(32)), SegmentKey(bytes(range(32)))), 300, 1.5)
    fields = json.loads(json.dumps(offer.fields("r", "engine")))
    assert (fields["do_remote_prefill"], fields["do_remote_decode"], fields["remote_num_tokens"]) == (True, False, 300)
    assert split_of(fields) == Split(prefill=RemotePrefill(("00" * 32, bytes(range(32)).hex()), 1.5))


def test_the_fields_that_proxies_send_to_an_engine_for_prefill() -> None:
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    assert split_of({"do_remote_decode": True, "do_remote_prefill": False, **nothing}) == PREFILLS
    assert split_of({"do_remote_decode": False, "do_remote_prefill": False, **nothing}) == NOT_SPLIT
    # A request that moves: no segments are named.
    blocks: object
    for blocks in (None, []):
        found = split_of({"do_remote_prefill": True, "remote_block_ids": blocks})
        assert found.prefill is not None
        assert found.prefill.keys == ()


@pytest.mark.parametrize("params", [None, {}, [], "x", 5, {"tokenlake": {}}, {"do_remote_prefill": None}])
def test_other_requests_are_not_split(params: object) -> None:
    assert split_of(params) == NOT_SPLIT
    assert not is_split(params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_block_ids", ["x"]),
        ("remote_block_ids", ["00" * 31]),
        # The numbers of another connector's blocks.
        ("remote_block_ids", [3]),
        ("remote_block_ids", [[1, 2]]),
        ("remote_block_ids", "00" * 32),
        ("remote_block_ids", ["0g" * 32]),
        ("remote_block_ids", ["é" * 64]),
        ("remote_block_ids", ["00" * 32] * (MAX_KEYS + 1)),
        ("remote_prefill_s", "1"),
        ("remote_prefill_s", -1),
        ("remote_prefill_s", math.nan),
        ("remote_prefill_s", math.inf),
        ("remote_prefill_s", None),
    ],
)
def test_an_invalid_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        split_of({"do_remote_prefill": True, field: value})


# -- the engine that computes the prompt


@pytest.mark.parametrize("tokens", PROMPTS)
@pytest.mark.parametrize("chunk", [5, 8, 1000])
def test_the_step_with_the_last_token_stores_the_tail(tokens: int, chunk: int) -> None:
    bench = Bench()
    one, offer, saves = offered(bench, tokens, chunk)
    keys = keys_of(bench, one.all_token_ids[:tokens])
    assert offer is not None
    assert (offer.keys, offer.tokens) == (tuple(keys), tokens)
    assert [key for save in saves for key in save.keys] == keys
    for save in saves:
        blocks = -(-(save.tail or len(save.keys) * SEGMENT) // 4)
        assert save.blocks == tuple(range(100 + 2 * save.first, 100 + 2 * save.first + blocks))
        assert save.marked
    tails = [save for save in saves if save.tail]
    assert [(save.tail, save.hints) for save in tails] == (
        [(tokens % SEGMENT, UNREAD)] if has_tail(tokens, SEGMENT) else []
    )
    # The markers are set in that step, before an answer can reach another engine.
    assert bench.pool.marked == [(tuple(keys), LONGEST_S)]
    assert bench.counters.read().prefills_offered == 1


@pytest.mark.parametrize("refuse_from", [0, 1, 4])
def test_refused_segments_are_not_offered(refuse_from: int) -> None:
    """With several ranks the scheduler's side reserves the slots."""
    bench = Bench(shared=True)
    bench.pool.refuse_from = refuse_from
    one = request(27)
    begin(bench, one)
    saves = bench.step(one, 0, 27).saves
    one.all_token_ids.append(7)
    bench.pool.refuse_from = 0
    keep, offer = bench.side.finished(one, blocks_of(one), LENGTH)
    keys = keys_of(bench, one.all_token_ids[:27])
    assert sum(len(save.keys) for save in saves) == min(refuse_from, 4)
    if refuse_from:
        assert offer is not None
        assert offer.keys == tuple(keys[: {1: 1, 4: 4}[refuse_from]])
    else:
        assert (keep, offer) == (False, None)


def test_no_wait_for_segments_refused_before_the_offer() -> None:
    """No engine waits for segments that were refused before the offer."""
    bench, one = Bench(), request(27)
    begin(bench, one)
    plan = bench.step(one, 0, 8)
    bench.side.worker_output(StepReport(plan.saves[-1].job), [], set())
    bench.step(one, 8, 8)
    bench.step(one, 16, 11)
    keys = keys_of(bench, one.all_token_ids)
    assert bench.pool.marked == [(tuple(keys[1:]), LONGEST_S)]


def test_a_refused_prompt_is_not_offered_again_in_each_step() -> None:
    """An engine for prefill may be asked for many tokens; each offer of several ranks waits for the daemon."""
    bench, one = Bench(shared=True), request(SEGMENT - 1)
    bench.pool.refuse_from = 0
    begin(bench, one)
    bench.step(one, 0, SEGMENT - 1)
    for _ in range(20):
        one.all_token_ids.append(7)
        bench.step(one, one.num_tokens - 1, 1)
    # The tail, and a reservation for each of the full segments that the tokens behind it complete.
    tails = [each for each in bench.pool.reservations if each.hints == UNREAD]
    assert len(tails) == 1


def test_nothing_is_offered_without_a_pool_or_stores() -> None:
    for bench, there in ((Bench(), False), (Bench(save=False), True)):
        bench.there = there
        one = request(27)
        begin(bench, one)
        bench.step(one, 0, 27)
        one.all_token_ids.append(7)
        assert bench.side.finished(one, blocks_of(one), LENGTH) == (False, None)
        assert bench.pool.marked == []


def test_an_aborted_prefill_offers_nothing() -> None:
    bench, one = Bench(), request(27)
    begin(bench, one)
    bench.step(one, 0, 7)
    assert bench.side.finished(one, blocks_of(one), ABORT) == (False, None)


def test_blocks_are_kept_until_the_prompt_is_stored() -> None:
    bench = Bench()
    _, offer, saves = offered(bench, 27)
    assert offer is not None
    assert bench.side.step([], lambda name: []).held == (("p", saves[-1].job),)
    # A prompt that is stored by then needs no blocks.
    one = request(27, "q", 1000)
    begin(bench, one)
    plan = bench.step(one, 0, 27)
    bench.side.worker_output(StepReport(plan.saves[-1].job), [], set())
    one.all_token_ids.append(7)
    keep, offer = bench.side.finished(one, blocks_of(one), LENGTH)
    assert (keep, offer is not None) == (False, True)


def test_the_time_of_a_prefill_is_stated_once_it_is_known() -> None:
    bench = Bench()
    _, offer, _ = offered(bench, 100)
    assert offer is not None
    assert "remote_prefill_s" not in offer.fields("r", "e")
    prefill(bench)
    _, offer, _ = offered(bench, 100, name="later")
    assert offer is not None
    assert offer.fields("r", "e")["remote_prefill_s"] == pytest.approx(100 * TOKEN_S, rel=0.05)


# -- the engine that decodes


@pytest.mark.parametrize("tokens", PROMPTS)
def test_all_tokens_but_the_last_are_loaded(tokens: int) -> None:
    bench = Bench()
    prompt = request(tokens).all_token_ids
    keys = keys_of(bench, prompt)
    bench.pool.known |= set(keys)
    one = decodes(bench, prompt, keys)
    assert bench.side.matched(one, 0) == tokens - 1
    bench.side.allocated(one, blocks_of(one), tokens - 1)
    plan = bench.side.step([], lambda name: [])
    (load,) = plan.loads
    assert (load.start, load.stop) == (0, tokens - 1)
    assert load.blocks == tuple(range(100, 100 + -(-(tokens - 1) // 4)))
    assert bench.pool.hinted == []
    bench.side.worker_output(StepReport(0), ["d"], set())
    # The tail is not needed any more.
    assert bench.pool.hinted == ([((keys[-1],), READ)] if has_tail(tokens, SEGMENT) else [])
    bench.step(one, tokens - 1, 1)
    bench.side.finished(one, blocks_of(one), LENGTH)
    counts = bench.counters.read()
    assert (counts.prefills_taken, counts.prefills_recomputed) == (1, 0)
    assert counts.tokens_hit == tokens - 1


def test_a_load_is_not_weighed() -> None:
    bench = Bench()
    prefill(bench)
    load(bench, LoadTime(0.0, 8.0))
    prompt, keys = prompt_of(bench)
    bench.pool.known |= set(keys)
    assert bench.side.matched(decodes(bench, prompt, keys), 0) == 26


def test_the_wait_is_bounded_by_what_computing_takes() -> None:
    bench = Bench()
    prompt = request(100).all_token_ids
    keys = keys_of(bench, prompt)
    for seconds, wait_s in ((2.0, 2.0 * FACTOR), (0.0, LEAST_WAIT_S), (1e6, LONGEST_S)):
        decodes(bench, prompt, keys, seconds, f"said {seconds}")
        options = bench.pool.matches[-1].options
        assert (options.in_flight_wait_s, options.in_flight_wait_per_segment_s) == (wait_s, 0.0)
        assert options.in_flight_expected_s == EXPECTED_S
    # The own measurements count more.
    prefill(bench)
    long = list(range(1000))
    decodes(bench, long, keys_of(bench, long), 9.0, "measured")
    assert bench.pool.matches[-1].options.in_flight_wait_s == pytest.approx(1000 * TOKEN_S * FACTOR, rel=0.05)


def test_a_wait_for_another_engine_goes_on() -> None:
    """A wait for another engine is not given up for an own request."""
    bench = Bench()
    prefill(bench)
    prompt = request(100).all_token_ids
    first = FakeRequest("first", list(prompt))
    bench.side.new_request(first)
    assert bench.side.matched(first, 0) == 0
    bench.pool.answers = False
    for number in range(20):
        one = decodes(bench, prompt, keys_of(bench, prompt), name=f"d{number}")
        assert bench.side.matched(one, 0) is None
        assert bench.pool.matches[-1].options.in_flight_wait_s > 0


def test_without_the_tail_the_rest_is_computed() -> None:
    bench = Bench()
    prompt, keys = prompt_of(bench)
    bench.pool.known |= set(keys[:-1])
    one = decodes(bench, prompt, keys)
    assert bench.side.matched(one, 0) == 24
    # This engine does not store the tail, so no other one waits for it.
    assert bench.pool.marked == [((keys[-1],), 0.0)]
    bench.side.allocated(one, blocks_of(one), 24)
    bench.step(one, 24, 3)
    bench.side.finished(one, blocks_of(one), LENGTH)
    counts = bench.counters.read()
    assert (counts.prefills_taken, counts.prefills_recomputed) == (0, 1)
    assert bench.pool.hinted[0][0] == tuple(keys[:-1]), "the tail was not read"


def test_a_lost_segment_hides_the_tail() -> None:
    bench = Bench()
    prompt, keys = prompt_of(bench)
    bench.pool.known |= {keys[0], keys[2], keys[3]}
    assert bench.side.matched(decodes(bench, prompt, keys), 0) == 8


def test_a_failed_load_is_no_hand_over() -> None:
    bench = Bench()
    prompt, keys = prompt_of(bench)
    bench.pool.known |= set(keys)
    one = decodes(bench, prompt, keys)
    bench.side.matched(one, 0)
    bench.side.allocated(one, blocks_of(one), 26)
    plan = bench.side.step([], lambda name: [])
    bench.side.worker_output(StepReport(0), ["d"], {plan.loads[0].blocks[-1]})
    bench.side.finished(one, blocks_of(one), LENGTH)
    counts = bench.counters.read()
    assert (counts.prefills_taken, counts.prefills_recomputed) == (0, 1)


def test_another_prompt_never_uses_the_tail() -> None:
    """A request with the keys of another prompt, or of fewer or more tokens, is served as any other."""
    prompt = request(27).all_token_ids
    for tokens in ([*prompt[:-1], 99], prompt[:-1], [*prompt, 27]):
        bench = Bench()
        keys = keys_of(bench, prompt)
        bench.pool.known |= set(keys)
        one = decodes(bench, tokens, keys)
        assert not set(bench.pool.matches[-1].keys) & {keys[-1]}
        assert bench.pool.matches[-1].options.in_flight_wait_s == 0.0
        assert bench.side.matched(one, 0) == 24
        (line,) = bench.refused
        assert "'d'" in line
        assert "layout" in line
        # A refusal is no failure of the pool.
        assert bench.reported == []
        bench.side.allocated(one, blocks_of(one), 24)
        bench.side.finished(one, blocks_of(one), LENGTH)
        assert bench.counters.read().prefills_recomputed == 1
    # A request without the fields does not ask for it.
    bench = Bench()
    bench.pool.known |= set(keys_of(bench, prompt))
    assert bench.place(request(27)) == 24
    assert len(bench.pool.matches[-1].keys) == 3


def test_a_request_that_lost_its_blocks_is_served_as_any_other() -> None:
    bench = Bench()
    prompt, keys = prompt_of(bench)
    bench.pool.known |= set(keys)
    one = decodes(bench, prompt, keys)
    assert bench.side.matched(one, 0) == 26
    bench.side.allocated(one, blocks_of(one), 26)
    one.all_token_ids += [1, 2, 3]
    assert bench.side.matched(one, 0) is not None
    assert list(bench.pool.matches[-1].keys) == bench.pool.prefix(one.all_token_ids).keys


def test_the_tails_of_a_flood_of_short_prompts_are_bounded() -> None:
    """Each tail takes the room of a segment."""
    bench, tails = Bench(), 0
    for number in range(20 * MAX_TAILS):
        one = request(2, f"short {number}", 10 * number)
        begin(bench, one)
        tails += sum(bool(save.tail) for save in bench.step(one, 0, 2).saves)
        one.all_token_ids.append(7)
        _, offer = bench.side.finished(one, blocks_of(one), LENGTH)
        assert offer is None or len(offer.keys) == 1
    assert MAX_TAILS < tails <= MAX_TAILS * SEGMENT / (SEGMENT - 2) + 20 * MAX_TAILS * 2 / (SEGMENT - 2)


@pytest.mark.parametrize("prompt", [SEGMENT // 2, SEGMENT - 1, 3 * SEGMENT + 1, 9 * SEGMENT + SEGMENT // 2])
def test_other_prompts_always_have_their_tail(prompt: int) -> None:
    room = TailRoom(SEGMENT)
    while room.take(1):
        pass
    assert all(room.take(prompt) for _ in range(1000))


def test_a_reset_while_blocks_are_kept_for_a_hand_over() -> None:
    """The segments are stored under the keys of the old weights, which the answer named, and then the blocks are
    free. Later requests have keys of the new weights."""
    bench = Bench()
    one, offer, saves = offered(bench, 27)
    keys = keys_of(bench, one.all_token_ids[:27])
    bench.side.new_weights("other")
    assert offer is not None
    assert offer.keys == tuple(keys)
    plan = bench.side.step([], lambda name: [])
    assert (plan.held, plan.reused) == ((("p", saves[-1].job),), ())
    bench.side.worker_output(StepReport(saves[-1].job), [], set())
    bench.pool.known |= set(keys)
    later = decodes(bench, one.all_token_ids[:27], keys)
    assert bench.side.matched(later, 0) == 0
    assert len(bench.refused) == 1


def test_new_weights_withdraw_an_offer() -> None:
    bench, one = Bench(), request(27)
    begin(bench, one)
    bench.step(one, 0, 27)
    bench.side.new_weights("other")
    one.all_token_ids.append(7)
    assert bench.side.finished(one, blocks_of(one), LENGTH)[1] is None


def test_an_unread_tail_stays_and_a_read_one_leaves_first() -> None:
    scene = Scene(slots=8)
    for number in range(8):
        scene.add(number, float(number), UNREAD if number in (0, 1) else NO_HINTS)
    scene.store.hint([scene.segments[1]], READ, 10.0)
    # A full memory: the tail that was read leaves first; the other one outlives segments that were stored later.
    scene.add(8, 18.0, kind=Kind.DIRTY)
    assert scene.gone() == [1]
    for number in (9, 10):
        scene.add(number, float(number + 10), kind=Kind.DIRTY)
    gone = scene.gone()
    assert 0 not in gone
    # After its time to live it leaves before all others.
    scene.add(11, 1.0 + UNREAD.ttl_s, kind=Kind.DIRTY)
    assert scene.gone() == [0, *gone]


# -- a request that moves


def test_an_aborted_request_lets_others_wait_for_its_segments() -> None:
    bench, one = Bench(), request(27)
    bench.place(one)
    plan = bench.step(one, 0, 27)
    keep, offer = bench.side.finished(one, blocks_of(one), ABORT)
    keys = tuple(bench.pool.prefix(one.all_token_ids).keys)
    assert (keep, offer) == (True, None)
    assert bench.pool.marked == [(keys, LONGEST_S)]
    held = bench.side.step([], lambda name: [])
    assert held.held == (("r", plan.saves[-1].job),)
    # The pool may have refused some of them, for which no engine must wait any longer.
    bench.side.worker_output(StepReport(plan.saves[-1].job), [], set())
    assert bench.pool.marked == [(keys, LONGEST_S), (keys, 0.0)]
    bench.side.worker_output(StepReport(plan.saves[-1].job), [], set())
    assert len(bench.pool.marked) == 2


def test_an_aborted_stored_request_leaves_at_once() -> None:
    """An aborted request whose segments are stored leaves at once."""
    bench, one = Bench(), request(27)
    bench.place(one)
    plan = bench.step(one, 0, 27)
    bench.side.worker_output(StepReport(plan.saves[-1].job), [], set())
    assert bench.side.finished(one, blocks_of(one), ABORT) == (False, None)
    assert bench.pool.marked == []


def test_a_request_that_moves_here_waits_without_named_segments() -> None:
    bench = Bench()
    prompt = request(30).all_token_ids
    bench.know(prompt)
    one = decodes(bench, prompt, [])
    assert bench.pool.matches[-1].options.in_flight_wait_s > 0
    assert list(bench.pool.matches[-1].keys) == bench.pool.prefix(prompt).keys
    assert bench.side.matched(one, 0) == 24


def test_a_load_after_lost_blocks_leaves_at_once() -> None:
    """vLLM frees the blocks of an aborted request when its load ends, and must not be told to free them again."""
    bench, one = Bench(), request(27)
    bench.place(one)
    bench.step(one, 0, 27)
    bench.know(one.all_token_ids)
    external = bench.side.matched(one, 0)
    assert external
    bench.side.allocated(one, blocks_of(one), external)
    bench.side.step([], lambda name: [])
    assert bench.side.finished(one, blocks_of(one), ABORT) == (False, None)
    assert bench.side.step([], lambda name: []).held == ()
