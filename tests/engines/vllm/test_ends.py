"""The end of a request reaches the pool once, as one of the pool's stop reasons."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.request import RequestStatus

from tests.connector.side import Bench, blocks_of, request
from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.request import end_of

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_REPETITION: "repetition",
}
GIVEN = Hints(Outlook.GOES_ON, "agent", priority=1)


def ended(bench: Bench, status: RequestStatus, hints: Hints | None, *, stored: bool = True) -> None:
    """A request that has blocks, and segments in the pool if they are `stored`, ends with vLLM's `status`."""
    asked = request(33)
    assert bench.ask(asked, hints) == 0
    bench.side.allocated(asked, blocks_of(asked), 0)
    if stored:
        bench.step(asked, 0, 33)
    keep, offer = bench.side.finished(asked, blocks_of(asked), end_of(status.name, 5))
    # The segments of an aborted request are stored, because another engine may go on with it.
    assert keep == (stored and status is RequestStatus.FINISHED_ABORTED)
    assert offer is None
    assert bench.reported == []


@pytest.mark.parametrize("status", [status for status in RequestStatus if RequestStatus.is_finished(status)])
@pytest.mark.parametrize("hints", [None, GIVEN])
def test_the_end_is_added_to_the_hints_of_the_request(status: RequestStatus, hints: Hints | None) -> None:
    bench = Bench()
    ended(bench, status, hints)
    sent = [hints for _, hints in bench.pool.hinted]
    expected = (hints or Hints()).ended(REASONS[status], 5) if status in REASONS else None
    assert sent == ([] if expected is None else [expected])


def test_no_hints_for_a_request_without_segments() -> None:
    bench = Bench()
    ended(bench, RequestStatus.FINISHED_ABORTED, GIVEN, stored=False)
    assert bench.pool.hinted == []
