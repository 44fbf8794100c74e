"""Prefill and decode on different engines: the fields of the answer, the tail of the prompt, and the wait for it."""

from __future__ import annotations

import json
import math

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import SEGMENT, TOKEN_S, Bench, blocks_of, load, prefill, request
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.in_flight import FACTOR, LONGEST_S
from tokenlake_client.engines.vllm.known.disaggregated import (
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
    split_of,
)
from tokenlake_client.engines.vllm.known.request import RequestEnd
from tokenlake_client.engines.vllm.known.step_plan import SavePlan, StepPlan
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.engines.vllm.served_request import is_split

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


def begin(bench: Bench, tokens: int, name: str = "p", first: int = 0) -> FakeRequest:
    """A prompt that is to be computed for another engine gets its blocks."""
    one = request(tokens, name, first)
    assert bench.place(one, split=PREFILLS) == 0
    return one


def finish(bench: Bench, one: FakeRequest) -> tuple[bool, Offer | None]:
    """The first token is generated, and the request ends."""
    one.all_token_ids.append(7)
    return bench.end(one, LENGTH)


class Decoder:
    """An engine that gets a prompt which another one has computed. `there`: the segments that the pool has. `asked`:
    the tokens of its request, if they are not those of the prompt."""

    def __init__(
        self,
        tokens: int = 27,
        there: slice = slice(None),
        asked: list[int] | None = None,
        bench: Bench | None = None,
        seconds: float = 1.0,
        name: str = "d",
    ) -> None:
        self.bench = bench or Bench()
        prompt = request(tokens).all_token_ids
        self.keys = keys_of(self.bench, prompt)
        self.bench.pool.known |= set(self.keys[there])
        self.one = FakeRequest(name, prompt if asked is None else asked)
        said = RemotePrefill(tuple(key.hex() for key in self.keys), seconds)
        self.bench.side.new_request(self.one, split=Split(prefill=said))
        self.match = self.bench.pool.matches[-1]

    def matched(self) -> int | None:
        return self.bench.side.matched(self.one, 0)

    def load(self) -> StepPlan:
        """The request gets its blocks, and the ranks the plan of the load."""
        external = self.matched()
        assert external is not None
        self.bench.side.allocated(self.one, blocks_of(self.one), external)
        return self.bench.idle()

    def ended(self) -> tuple[int, int]:
        """The request ends. Returns (requests of which all but a token was loaded, others)."""
        self.bench.end(self.one, LENGTH)
        counts = self.bench.counters.read()
        return counts.prefills_taken, counts.prefills_recomputed


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
    bench, saves = Bench(), list[SavePlan]()
    one = begin(bench, tokens)
    for computed in range(0, tokens, chunk):
        saves += bench.step(one, computed, min(chunk, tokens - computed)).saves
    keys = keys_of(bench, one.all_token_ids)
    # The markers are set in that step, before an answer can reach another engine.
    assert bench.pool.marked == [(tuple(keys), LONGEST_S)]
    keep, offer = finish(bench, one)
    assert keep
    assert offer is not None
    assert (offer.keys, offer.tokens, offer.seconds) == (tuple(keys), tokens, None)
    assert [key for save in saves for key in save.keys] == keys
    for save in saves:
        blocks = -(-(save.tail or len(save.keys) * SEGMENT) // 4)
        assert save.blocks == tuple(range(100 + 2 * save.first, 100 + 2 * save.first + blocks))
        assert save.marked
    tails = [(tokens % SEGMENT, UNREAD)] if has_tail(tokens, SEGMENT) else []
    assert [(save.tail, save.hints) for save in saves if save.tail] == tails
    # vLLM keeps the blocks until the prompt is stored.
    assert bench.idle().held == (("p", saves[-1].job),)


def test_a_stored_prompt_needs_no_blocks() -> None:
    """No engine waits for segments that were stored, or refused, before the offer."""
    bench = Bench()
    one = begin(bench, 27)
    plan = bench.step(one, 0, 8)
    bench.report(plan.saves[-1].job)
    plan = bench.step(one, 8, 19)
    assert bench.pool.marked == [(tuple(keys_of(bench, one.all_token_ids)[1:]), LONGEST_S)]
    bench.report(plan.saves[-1].job)
    keep, offer = finish(bench, one)
    assert (keep, offer is not None) == (False, True)


@pytest.mark.parametrize("granted", [0, 1, 4])
def test_refused_segments_are_not_offered(granted: int) -> None:
    """With several ranks the scheduler's side reserves the slots."""
    bench = Bench(shared=True)
    bench.pool.refuse_from = granted
    one = begin(bench, 27)
    keys = keys_of(bench, one.all_token_ids)
    assert sum(len(save.keys) for save in bench.step(one, 0, 27).saves) == granted
    bench.pool.refuse_from = 0
    keep, offer = finish(bench, one)
    assert (keep, offer and offer.keys) == (granted > 0, tuple(keys[:granted]) if granted else None)


def test_a_refused_prompt_is_not_offered_again_in_each_step() -> None:
    """An engine for prefill may be asked for many tokens; each offer of several ranks waits for the daemon."""
    bench = Bench(shared=True)
    bench.pool.refuse_from = 0
    one = begin(bench, SEGMENT - 1)
    bench.step(one, 0, SEGMENT - 1)
    for _ in range(20):
        one.all_token_ids.append(7)
        bench.step(one, one.num_tokens - 1, 1)
    # The tail, and a reservation for each of the full segments that the tokens behind it complete.
    assert [each.hints for each in bench.pool.reservations].count(UNREAD) == 1


def test_an_engine_that_does_not_store_offers_nothing() -> None:
    bench = Bench(save=False)
    one = begin(bench, 27)
    bench.step(one, 0, 27)
    assert finish(bench, one) == (False, None)
    assert bench.pool.marked == []


def test_an_aborted_prefill_offers_nothing() -> None:
    bench = Bench()
    one = begin(bench, 27)
    bench.step(one, 0, 7)
    assert bench.end(one, ABORT) == (False, None)


def test_the_tails_of_a_flood_of_short_prompts_are_bounded() -> None:
    """Each tail takes the room of a segment."""
    bench, tails = Bench(), 0
    for number in range(20 * MAX_TAILS):
        one = begin(bench, 2, f"short {number}", 10 * number)
        tails += sum(bool(save.tail) for save in bench.step(one, 0, 2).saves)
        _, offer = finish(bench, one)
        assert offer is None or len(offer.keys) == 1
    assert MAX_TAILS < tails <= MAX_TAILS * SEGMENT / (SEGMENT - 2) + 20 * MAX_TAILS * 2 / (SEGMENT - 2)


@pytest.mark.parametrize("prompt", [SEGMENT // 2, SEGMENT - 1, 3 * SEGMENT + 1, 9 * SEGMENT + SEGMENT // 2])
def test_other_prompts_always_have_their_tail(prompt: int) -> None:
    room = TailRoom(SEGMENT)
    while room.take(1):
        pass
    assert all(room.take(prompt) for _ in range(1000))


# -- the engine that decodes


@pytest.mark.parametrize("tokens", PROMPTS)
def test_all_tokens_but_the_last_are_loaded(tokens: int) -> None:
    """Whatever the load costs."""
    bench = Bench()
    prefill(bench)
    load(bench, LoadTime(0.0, 8.0))
    decoder = Decoder(tokens, bench=bench)
    plan = decoder.load()
    (one,) = plan.loads
    assert (one.start, one.stop) == (0, tokens - 1)
    assert one.blocks == tuple(range(100, 100 + -(-(tokens - 1) // 4)))
    assert bench.pool.hinted == []
    bench.report(0, ["d"])
    # The tail is not needed any more.
    assert bench.pool.hinted == ([((decoder.keys[-1],), READ)] if has_tail(tokens, SEGMENT) else [])
    bench.step(decoder.one, tokens - 1, 1)
    assert decoder.ended() == (1, 0)


def test_the_wait_is_bounded_by_what_computing_takes() -> None:
    bench = Bench()
    for seconds, wait_s in ((2.0, 2.0 * FACTOR), (0.0, LEAST_WAIT_S), (1e6, LONGEST_S)):
        options = Decoder(100, bench=bench, seconds=seconds, name=f"said {seconds}").match.options
        assert (options.in_flight_wait_s, options.in_flight_wait_per_segment_s) == (wait_s, 0.0)
        assert options.in_flight_expected_s == EXPECTED_S
    # The own measurements count more.
    prefill(bench)
    options = Decoder(1000, bench=bench, seconds=9.0, name="measured").match.options
    assert options.in_flight_wait_s == pytest.approx(1000 * TOKEN_S * FACTOR, rel=0.05)


def test_a_wait_for_another_engine_goes_on() -> None:
    """A wait for another engine is not given up for an own request."""
    bench = Bench()
    prefill(bench)
    assert bench.ask(request(100, "first")) == 0
    bench.pool.answers = False
    for number in range(20):
        decoder = Decoder(100, slice(0), bench=bench, name=f"d{number}")
        assert decoder.matched() is None
        assert decoder.match.options.in_flight_wait_s > 0


def test_without_the_tail_the_rest_is_computed() -> None:
    decoder = Decoder(there=slice(-1))
    decoder.load()
    pool = decoder.bench.pool
    # This engine does not store the tail, so no other one waits for it.
    assert pool.marked == [((decoder.keys[-1],), 0.0)]
    decoder.bench.step(decoder.one, 24, 3)
    assert decoder.ended() == (0, 1)
    assert pool.hinted[0][0] == tuple(decoder.keys[:-1]), "the tail was not read"


def test_a_failed_load_is_no_hand_over() -> None:
    decoder = Decoder()
    plan = decoder.load()
    decoder.bench.report(0, ["d"], {plan.loads[0].blocks[-1]})
    assert decoder.ended() == (0, 1)


PROMPT = request(27).all_token_ids


@pytest.mark.parametrize("asked", [[*PROMPT[:-1], 99], PROMPT[:-1], [*PROMPT, 27]], ids=["other", "shorter", "longer"])
def test_another_prompt_never_uses_the_tail(asked: list[int]) -> None:
    """A request with the keys of another prompt, or of fewer or more tokens, is served as any other."""
    decoder = Decoder(asked=asked)
    bench = decoder.bench
    assert decoder.keys[-1] not in decoder.match.keys
    assert decoder.match.options.in_flight_wait_s == 0.0
    assert decoder.matched() == 24
    (line,) = bench.refused
    assert "'d'" in line
    assert "layout" in line
    # A refusal is no failure of the pool.
    assert bench.reported == []
    decoder.load()
    assert decoder.ended() == (0, 1)
    # A request without the fields does not ask for it.
    assert bench.place(request(27)) == 24
    assert len(bench.pool.matches[-1].keys) == 3


def test_a_request_that_lost_its_blocks_is_served_as_any_other() -> None:
    decoder = Decoder()
    decoder.load()
    decoder.one.all_token_ids += [1, 2, 3]
    assert decoder.matched() is not None
    pool = decoder.bench.pool
    assert list(pool.matches[-1].keys) == pool.prefix(decoder.one.all_token_ids).keys


# -- weights that change


def test_a_reset_while_blocks_are_kept_for_a_hand_over() -> None:
    """The segments are stored under the keys of the old weights, which the answer named, and then the blocks are
    free. Later requests have keys of the new weights."""
    bench = Bench()
    one = begin(bench, 27)
    saves = bench.step(one, 0, 27).saves
    finish(bench, one)
    bench.side.new_weights("other")
    plan = bench.idle()
    assert (plan.held, plan.reused) == ((("p", saves[-1].job),), ())
    bench.report(saves[-1].job)
    assert Decoder(bench=bench).matched() == 0
    assert len(bench.refused) == 1


def test_new_weights_withdraw_an_offer() -> None:
    bench = Bench()
    one = begin(bench, 27)
    bench.step(one, 0, 27)
    bench.side.new_weights("other")
    assert finish(bench, one)[1] is None


# -- a request that moves


def test_an_aborted_request_lets_others_wait_for_its_segments() -> None:
    bench, one = Bench(), request(27)
    bench.place(one)
    plan = bench.step(one, 0, 27)
    keep, offer = bench.end(one, ABORT)
    keys = tuple(bench.pool.prefix(one.all_token_ids).keys)
    assert (keep, offer) == (True, None)
    assert bench.pool.marked == [(keys, LONGEST_S)]
    held = bench.idle()
    assert held.held == (("r", plan.saves[-1].job),)
    # The pool may have refused some of them, for which no engine must wait any longer.
    bench.report(plan.saves[-1].job)
    assert bench.pool.marked == [(keys, LONGEST_S), (keys, 0.0)]
    bench.report(plan.saves[-1].job)
    assert len(bench.pool.marked) == 2


def test_an_aborted_stored_request_leaves_at_once() -> None:
    """An aborted request whose segments are stored leaves at once."""
    bench, one = Bench(), request(27)
    bench.place(one)
    plan = bench.step(one, 0, 27)
    bench.report(plan.saves[-1].job)
    assert bench.end(one, ABORT) == (False, None)
    assert bench.pool.marked == []


def test_a_load_after_lost_blocks_leaves_at_once() -> None:
    """vLLM frees the blocks of an aborted request when its load ends, and must not be told to free them again."""
    bench, one = Bench(), request(27)
    bench.place(one)
    bench.step(one, 0, 27)
    bench.know(one.all_token_ids)
    external = bench.side.matched(one, 0)
    assert external
    bench.side.allocated(one, blocks_of(one), external)
    bench.idle()
    assert bench.end(one, ABORT) == (False, None)
    assert bench.idle().held == ()
