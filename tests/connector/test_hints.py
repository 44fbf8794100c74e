"""Hints of a request: read from what it says, passed with its lookup and its segments, completed by its end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.side import Bench, blocks_of, request
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.hints import hints_of

AGENT = Hints(Outlook.GOES_ON, "agent", priority=1, ttl_s=600.0)
AT_ITS_END = Hints(Outlook.GOES_ON, "agent", "stop", 1, 600.0, 5)


def test_what_a_request_says() -> None:
    said = {"outlook": "goes_on", "category": "agent", "priority": 1, "ttl_s": 600}
    assert hints_of({"tokenlake": said, "other": 1}) == AGENT
    assert hints_of(None) is hints_of({}) is hints_of({"other": 1}) is None
    assert hints_of({"tokenlake": {}}) == Hints()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("over", "holds the fields outlook, category, priority, ttl_s"),
        ({"outlok": "over"}, "'outlok'; known: outlook"),
        ({"outlook": "perhaps"}, "'perhaps'; unknown, goes_on, over"),
        ({"outlook": 2}, "'outlook'"),
        ({"category": "x" * 33}, "'category' has 33 characters"),
        ({"priority": 5}, "'priority' is 5"),
        ({"priority": True}, "'priority'"),
        ({"ttl_s": float("nan")}, "'ttl_s' is nan"),
        ({"ttl_s": "600"}, "'ttl_s'"),
        ({"ttl_s": 10**400}, "'ttl_s'"),
        ({"category": "\ud800"}, "'category'"),
    ],
)
def test_what_has_no_meaning_is_named(said: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        hints_of({"tokenlake": said})


def test_a_hint_goes_with_the_lookup_and_with_what_is_stored() -> None:
    bench, asked = Bench("sync"), request(33)
    bench.side.new_request(asked, AGENT)
    assert [(match.options.hints, match.options.prompt_tokens) for match in bench.pool.matches] == [(AGENT, 33)]
    bench.side.allocated(asked, blocks_of(asked), 0)
    saves = bench.step(asked, 0, 33).saves
    assert [save.hints for save in saves] == [AGENT]
    assert not bench.side.finished(asked, blocks_of(asked), complete=True, stop_reason="stop", output_tokens=5)
    assert bench.pool.hinted == [(tuple(bench.pool.prefix(asked.all_token_ids).keys), AT_ITS_END)]


def test_what_is_stored_last_knows_how_the_request_ended() -> None:
    bench, asked = Bench("sync"), request(33)
    bench.place(asked)
    bench.step(asked, 0, 17)
    asked.num_computed_tokens = 33
    asked.all_token_ids.append(1)
    assert bench.side.finished(asked, blocks_of(asked), complete=True, stop_reason="length", output_tokens=1)
    plan = bench.side.step([], lambda name: [])
    assert [save.hints for save in plan.saves] == [Hints(stop_reason="length", output_tokens=1)]
    # One word, about what is there already.
    keys = tuple(bench.pool.prefix(asked.all_token_ids).keys)
    assert bench.pool.hinted == [(keys[:2], Hints(stop_reason="length", output_tokens=1))]


def test_slots_that_several_ranks_fill_have_it_too() -> None:
    bench, asked = Bench("sync", shared=True), request(33)
    bench.side.new_request(asked, AGENT)
    bench.side.allocated(asked, blocks_of(asked), 0)
    bench.step(asked, 0, 33)
    assert [reserved.hints for reserved in bench.pool.reservations] == [AGENT]


def test_nothing_is_said_where_nothing_is_known_or_nobody_is_there() -> None:
    bench, asked, other = Bench(), request(33), request(33, "s", 100)
    bench.place(asked)
    bench.side.finished(asked, blocks_of(asked), complete=True)
    # Given up before it had blocks: none of it is in the pool.
    waiting = request(33, "t", 200)
    bench.side.new_request(waiting)
    bench.side.finished(waiting, [], complete=False, stop_reason="abort", output_tokens=0)
    bench.place(other)
    bench.step(other, 0, 33)
    bench.there = False
    bench.side.finished(other, blocks_of(other), complete=True, stop_reason="stop")
    assert bench.pool.hinted == []
    assert bench.reported == []


def test_a_pool_that_fails_at_the_end_costs_the_request_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench("sync"), request(33)
    bench.place(asked)
    bench.step(asked, 0, 33)
    monkeypatch.setattr(bench.pool, "hint", lambda keys, hints: 1 // 0)
    assert not bench.side.finished(asked, blocks_of(asked), complete=True, stop_reason="stop", output_tokens=3)
    assert bench.reported == ["passing a hint on"]
