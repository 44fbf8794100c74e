"""What an engine tells the pool about the request for which it reads or stores segments."""

from __future__ import annotations

from typing import NamedTuple

from tokenlake.hints import Hints
from tokenlake_client.engines.common.in_flight import NO_WAIT, InFlightWait
from tokenlake_client.match import MatchOptions


class RequestInfo(NamedTuple):
    """The facts that an engine tells the pool about the request for which it reads or stores segments."""

    name: str | None = None
    """The request's name in logs and for `tokenlake explain`; None: the pool makes one up."""
    hints: Hints | None = None
    tokens: int = 0
    """The number of tokens of the request's prompt."""
    traceparent: str | None = None
    """The span of the request, as of `MatchOptions`."""

    def match_options(self, wait: InFlightWait = NO_WAIT) -> MatchOptions:
        """The options of a match that the request makes. `wait`: how long the match may wait for other engines."""
        return MatchOptions(
            request=self.name,
            hints=self.hints,
            prompt_tokens=self.tokens,
            in_flight_wait_s=wait.total_s,
            in_flight_wait_per_segment_s=wait.segment_s,
            in_flight_expected_s=wait.expected_s,
            traceparent=self.traceparent,
        )


UNNAMED = RequestInfo()
