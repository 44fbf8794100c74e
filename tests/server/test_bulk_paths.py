"""The paths to a node take turns, and one that failed comes last."""

from __future__ import annotations

import pytest

from tokenlake.config import Address
from tokenlake_server.bulk.paths import PAUSE_S, BulkPaths
from tokenlake_server.peers.addresses import PeerAddresses


def test_paths_take_turns_and_one_that_failed_comes_last() -> None:
    now = 0.0
    addresses = PeerAddresses({"b": Address("10.0.0.1", 1)})
    addresses.tell("b", ["10.0.1.1:2", "[fd00::1]:3", "10.0.0.1:1"])
    paths = BulkPaths(addresses, lambda: now)
    main, second, third = paths.order("b", 0)
    assert [each.address[:2] for each in (main, second, third)] == [("10.0.0.1", 1), ("10.0.1.1", 2), ("fd00::1", 3)]
    assert paths.order("b", 1) == [second, third, main]
    assert paths.order("b", 5) == [third, main, second]
    paths.failed("b", second)
    assert paths.order("b", 1) == [third, main, second]
    paths.failed("b", third)
    assert paths.order("b", 2) == [main, third, second]
    paths.failed("b", main)
    assert paths.order("b", 2) == [third, main, second]
    now = PAUSE_S
    assert paths.order("b", 1) == [second, third, main]


def test_addresses_that_may_not_be_used() -> None:
    addresses = PeerAddresses({"b": Address("127.0.0.1", 1)}, loopback_only=True)
    with pytest.raises(ValueError, match=r"10.0.0.1:2 \(.*beyond loopback.*nonsense"):
        addresses.tell("b", ["10.0.0.1:2", "nonsense", "127.0.0.2:3"])
    assert [each.address for each in addresses.bulk("b")] == [("127.0.0.1", 1), ("127.0.0.2", 3)]
    # The node was started elsewhere: what it told no longer holds.
    addresses.change({"b": Address("127.0.0.1", 9)})
    assert [each.address for each in addresses.bulk("b")] == [("127.0.0.1", 9)]
