"""Hints go with lookups and saves, and are completed by the end of the request."""

from __future__ import annotations

import pytest

from tests.connector.side import Bench, blocks_of, request
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.request import RequestEnd

AGENT = Hints(Outlook.GOES_ON, "agent", priority=1, ttl_s=600.0)
AGENT_ENDED = Hints(Outlook.GOES_ON, "agent", "stop", 1, 600.0, 5)


def test_hints_go_with_lookups_and_saves() -> None:
    bench, asked = Bench(), request(33)
    bench.side.new_request(asked, AGENT)
    assert [(match.options.hints, match.options.prompt_tokens) for match in bench.pool.matches] == [(AGENT, 33)]
    bench.side.allocated(asked, blocks_of(asked), 0)
    saves = bench.step(asked, 0, 33).saves
    assert [save.hints for save in saves] == [AGENT]
    assert not bench.side.finished(
        asked, blocks_of(asked), RequestEnd(complete=True, stop_reason="stop", output_tokens=5)
    )[0]
    assert bench.pool.hinted == [(tuple(bench.pool.prefix(asked.all_token_ids).keys), AGENT_ENDED)]


def test_last_saves_carry_the_end_of_the_request() -> None:
    bench, asked = Bench(), request(33)
    bench.place(asked)
    bench.step(asked, 0, 17)
    asked.num_computed_tokens = 33
    asked.all_token_ids.append(1)
    assert bench.side.finished(
        asked, blocks_of(asked), RequestEnd(complete=True, stop_reason="length", output_tokens=1)
    )[0]
    plan = bench.side.step([], lambda name: [])
    assert [save.hints for save in plan.saves] == [Hints(stop_reason="length", output_tokens=1)]
    # One message has the hints for all segments that are stored already.
    keys = tuple(bench.pool.prefix(asked.all_token_ids).keys)
    assert bench.pool.hinted == [(keys[:2], Hints(stop_reason="length", output_tokens=1))]


def test_reservations_carry_hints() -> None:
    bench, asked = Bench(shared=True), request(33)
    bench.side.new_request(asked, AGENT)
    bench.side.allocated(asked, blocks_of(asked), 0)
    bench.step(asked, 0, 33)
    assert [reserved.hints for reserved in bench.pool.reservations] == [AGENT]


def test_no_hints_without_news_segments_or_pool() -> None:
    bench, asked, other = Bench(), request(33), request(33, "s", 100)
    bench.place(asked)
    bench.side.finished(asked, blocks_of(asked), RequestEnd(complete=True))
    # The request is aborted before it has blocks: none of its segments is in the pool.
    waiting = request(33, "t", 200)
    bench.side.new_request(waiting)
    bench.side.finished(waiting, [], RequestEnd(complete=False, stop_reason="abort", output_tokens=0))
    bench.place(other)
    bench.step(other, 0, 33)
    bench.there = False
    bench.side.finished(other, blocks_of(other), RequestEnd(complete=True, stop_reason="stop"))
    assert bench.pool.hinted == []
    assert bench.reported == []


def test_a_failing_hint_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), request(33)
    bench.place(asked)
    bench.step(asked, 0, 33)
    monkeypatch.setattr(bench.pool, "hint", lambda keys, hints: 1 // 0)
    assert not bench.side.finished(
        asked, blocks_of(asked), RequestEnd(complete=True, stop_reason="stop", output_tokens=3)
    )[0]
    assert bench.reported == ["sending hints"]
