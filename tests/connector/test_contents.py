"""The contents of segments for routers, sent with the saves where the daemon publishes the model."""

from __future__ import annotations

import pytest

from tests.connector.fakes import FakeRequest
from tests.connector.side import MODEL, SEGMENT, Bench, request
from tokenlake.content import contents_of
from tokenlake_client.engines.vllm.adapters import RequestAdapter


def saved(bench: Bench, asked: FakeRequest) -> list[bytes]:
    """The contents that are sent for the segments of one request."""
    bench.place(asked)
    plan = bench.step(asked, 0, asked.num_tokens)
    return [*bench.pool.contents_sent, *(content for save in plan.saves for content in save.contents)]


@pytest.mark.parametrize("shared", [False, True])
def test_the_contents_of_all_segments_are_sent(shared: bool) -> None:
    bench, asked = Bench(shared=shared), request(2 * SEGMENT + 3)
    bench.pool.published = (MODEL,)
    chain = bench.pool.prefix(asked.all_token_ids)
    assert saved(bench, asked) == [*contents_of(chain, asked.all_token_ids, range(2), MODEL)]


def test_none_are_sent_unless_the_daemon_publishes_the_model() -> None:
    bench = Bench()
    bench.pool.published = ("another model",)
    assert saved(bench, request(2 * SEGMENT)) == []


def test_none_are_sent_where_tokens_do_not_decide() -> None:
    """No contents are sent for a prompt that its tokens do not determine."""
    bench = Bench()
    bench.pool.published = (MODEL,)
    salted = request(2 * SEGMENT)
    salted.cache_salt = "mine"
    assert saved(bench, salted) == []
    with_image = request(2 * SEGMENT, "image", 500)
    bench.side.new_request(with_image, None, None, {0: [b"digest"]})
    assert bench.side.matched(with_image, 0) == 0
    bench.side.allocated(with_image, list(range(100, 110)), 0)
    plan = bench.step(with_image, 0, with_image.num_tokens)
    assert [save.contents for save in plan.saves] == [()]


def test_the_adapter_has_the_name_that_requests_use() -> None:
    bench, asked = Bench(), request(SEGMENT + 1)
    bench.pool.published = (MODEL,)
    adapter = RequestAdapter(1, "lora", "/path")
    adapter.digest = "digest"
    assert bench.place(asked, adapter=adapter) == 0
    (save,) = bench.step(asked, 0, asked.num_tokens).saves
    chain = bench.pool.prefix(asked.all_token_ids, adapter="digest")
    assert save.contents == contents_of(chain, asked.all_token_ids, range(1), MODEL, "lora")
