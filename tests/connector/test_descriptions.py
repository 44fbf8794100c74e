"""What goes with lookups and saves: hints, which the end of the request completes, and contents for routers, where the
daemon publishes the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.side import ABORTED, MODEL, SEGMENT, Bench, request
from tokenlake.content import contents_of
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.adapters import RequestAdapter
from tokenlake_client.engines.vllm.known.request import RequestEnd

AGENT = Hints(Outlook.GOES_ON, "agent", priority=1, ttl_s=600.0)
AGENT_ENDED = Hints(Outlook.GOES_ON, "agent", "stop", 1, 600.0, 5)
STOP = RequestEnd(complete=True, stop_reason="stop", output_tokens=5)


@pytest.mark.parametrize("shared", [False, True])
def test_hints_go_with_lookups_and_saves(shared: bool) -> None:
    """Where ranks share segments, they go with the reservation."""
    bench, asked = Bench(shared=shared), request(33)
    assert bench.place(asked, hints=AGENT) == 0
    assert [(match.options.hints, match.options.prompt_tokens) for match in bench.pool.matches] == [(AGENT, 33)]
    saves = bench.step(asked, 0, 33).saves
    assert [each.hints for each in (bench.pool.reservations if shared else saves)] == [AGENT]
    assert not bench.end(asked, STOP)[0]
    assert bench.pool.hinted == [(tuple(bench.pool.prefix(asked.all_token_ids).keys), AGENT_ENDED)]


def test_last_saves_carry_the_end_of_the_request() -> None:
    """One message has the hints for all segments that are stored already."""
    bench, asked = Bench(), request(33)
    bench.place(asked)
    bench.step(asked, 0, 17)
    asked.num_computed_tokens = 33
    asked.all_token_ids.append(1)
    assert bench.end(asked, STOP)[0]
    ended = Hints(stop_reason="stop", output_tokens=5)
    assert [save.hints for save in bench.idle().saves] == [ended]
    assert bench.pool.hinted == [(tuple(bench.pool.prefix(asked.all_token_ids).keys)[:2], ended)]


def test_no_hints_without_news_segments_or_pool() -> None:
    bench, asked, other = Bench(), request(33), request(33, "s", 100)
    bench.place(asked)
    bench.end(asked)
    # The request is aborted before it has blocks: none of its segments is in the pool.
    waiting = request(33, "t", 200)
    bench.side.new_request(waiting)
    bench.end(waiting, ABORTED)
    bench.place(other)
    bench.step(other, 0, 33)
    bench.there = False
    bench.end(other, STOP)
    assert bench.pool.hinted == []
    assert bench.reported == []


def test_a_failing_hint_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), request(33)
    bench.place(asked)
    bench.step(asked, 0, 33)
    monkeypatch.setattr(bench.pool, "hint", lambda keys, hints: 1 // 0)
    assert not bench.end(asked, STOP)[0]
    assert bench.reported == ["sending hints"]


# -- contents


def adapter() -> RequestAdapter:
    made = RequestAdapter(1, "lora", "/path")
    made.digest = "digest"
    return made


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("published", "salt", "said", "sent"),
    [
        (MODEL, None, {}, True),
        ("another model", None, {}, False),
        # The tokens do not determine these segments.
        (MODEL, "mine", {}, False),
        (MODEL, None, {"extras": {0: [b"digest of an image"]}}, False),
        (MODEL, None, {"adapter": adapter()}, True),
    ],
    ids=["plain", "another model", "salted", "image", "adapter"],
)
def test_contents(published: str, salt: str | None, said: dict[str, Any], sent: bool, shared: bool) -> None:
    """An adapter has the name that requests use."""
    bench, asked = Bench(shared=shared), request(2 * SEGMENT + 3)
    bench.pool.published, asked.cache_salt = (published,), salt
    assert bench.place(asked, **said) == 0
    plan = bench.step(asked, 0, asked.num_tokens)
    found = [*bench.pool.contents_sent, *(content for save in plan.saves for content in save.contents)]
    names = ("digest", "lora") if "adapter" in said else (None, "")
    chain = bench.pool.prefix(asked.all_token_ids, adapter=names[0])
    assert found == ([*contents_of(chain, asked.all_token_ids, range(2), MODEL, names[1])] if sent else [])
