"""The messages of the planner's types, between the daemon and its client."""

from __future__ import annotations

import math

import pytest

from tokenlake.config import Secret, Tenant
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Request, grow
from tokenlake_server.scheduling import messages

TOKENS = 16
MODEL = Model(layers=4, segment_bytes=1 << 20, query_bytes=1 << 12)
KEYS = tuple(SegmentKey(bytes([number]) * 32) for number in range(8))
HERE = NodeId("a")
TENANT = Tenant(name="red", secret=Secret(32))


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    request = Request(name="r", keys=KEYS, tokens=8 * TOKENS + 5)
    message = messages.tree_message(grow([request], dict.fromkeys(KEYS, (HERE,)), TOKENS))
    message.sequences[0].disk_s = seconds
    with pytest.raises(ValueError, match="disk_s"):
        messages.tree_of(message, TENANT)
