"""How vLLM's requests end is told to the pool, in its words, once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tokenlake_client.engines.vllm.trouble import Trouble
from vllm.v1.request import RequestStatus

from tests.connector.side import Bench, blocks_of, request
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm import TokenLakeConnector

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_REPETITION: "repetition",
}
SAID = Hints(Outlook.GOES_ON, "agent", priority=1)


def ended(bench: Bench, status: RequestStatus, hints: Hints | None, *, stored: bool = True) -> None:
    """A request ends as vLLM says it does."""
    connector = TokenLakeConnector.__new__(TokenLakeConnector)
    connector._scheduler, connector._connection, connector._trouble = bench.side, None, Trouble(bench.counters)
    asked: Any = request(33)
    bench.side.new_request(asked, hints)
    assert bench.side.matched(asked, 0) == 0
    bench.side.allocated(asked, blocks_of(asked), 0)
    if stored:
        bench.step(asked, 0, 33)
    asked.status, asked.num_output_tokens = status, 5
    assert connector.request_finished(asked, blocks_of(asked)) == (False, None)
    assert bench.counters.read().failures == 0


@pytest.mark.parametrize("status", [status for status in RequestStatus if RequestStatus.is_finished(status)])
@pytest.mark.parametrize("hints", [None, SAID])
def test_one_word_about_the_end_beside_what_the_request_said(status: RequestStatus, hints: Hints | None) -> None:
    bench = Bench()
    ended(bench, status, hints)
    said = [word for _, word in bench.pool.hinted]
    expected = (hints or Hints()).ended(REASONS[status], 5) if status in REASONS else None
    assert said == ([] if expected is None else [expected])


def test_nothing_is_said_of_what_is_not_in_the_pool() -> None:
    bench = Bench()
    ended(bench, RequestStatus.FINISHED_ABORTED, SAID, stored=False)
    assert bench.pool.hinted == []
