"""The messages of the planner's types, between the daemon and its client."""

from __future__ import annotations

import math

import pytest

from tokenlake.config import Secret, Tenant
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Rates, Request, gen_plans, grow
from tokenlake_client.control import messages as of_client
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.scheduling import messages

TOKENS = 16
MODEL = Model(layers=4, segment_bytes=1 << 20, query_bytes=1 << 12)
KEYS = tuple(SegmentKey(bytes([number]) * 32) for number in range(8))
HERE = NodeId("a")
TENANT = Tenant(name="red", secret=Secret(32))


def there_and_back(message: pb.PrefixTree, requests: list[Request]) -> pb.PrefixTree:
    return of_client.tree_message(of_client.tree_of(message, requests))


def test_a_plan_over_messages_counts_disks() -> None:
    """A plan over messages counts the time on disks as a plan in this process does."""
    request = Request(name="r", keys=KEYS, tokens=8 * TOKENS + 5, answer_tokens=4)
    owners = dict.fromkeys(KEYS, (HERE,))
    tree = grow([request], owners, TOKENS, dict.fromkeys(KEYS[3:], 0.2))
    received = messages.tree_of(there_and_back(messages.tree_message(tree), [request]), TENANT)
    assert [(len(each.keys), each.disk_s) for each in received.sequences] == [(3, 0.0), (5, pytest.approx(1.0))]
    seconds = [
        gen_plans([[0]], [1], each, {"i": HERE}, MODEL, Rates()).query_plans[0].seconds
        for each in (received, tree, grow([request], owners, TOKENS))
    ]
    assert seconds[0] == pytest.approx(seconds[1]) == pytest.approx(seconds[2] + 1.0)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    request = Request(name="r", keys=KEYS, tokens=8 * TOKENS + 5)
    message = messages.tree_message(grow([request], dict.fromkeys(KEYS, (HERE,)), TOKENS))
    message.sequences[0].disk_s = seconds
    with pytest.raises(ValueError, match="disk_s"):
        messages.tree_of(message, TENANT)
