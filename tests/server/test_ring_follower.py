"""A daemon follows the members although a change fails."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from tokenlake.config import Address
from tokenlake.core import CoreConfig, NodeCore
from tokenlake.directory.ring_record import RingRecord
from tokenlake_server.membership import Members
from tokenlake_server.start import ring_follower
from tokenlake_server.start.ring_follower import RingFollower


async def test_a_change_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_follower, "AGAIN_S", 0.0)
    alone = RingRecord.of({"n0": 1 << 16})
    core = NodeCore(CoreConfig("n0", 1, alone, 1, 1 << 13))
    followed = asyncio.Event()
    outcomes = iter([OSError("no memory for a thread"), OSError("still none"), None])

    def set_peers(addresses: dict[str, Address | None]) -> None:
        if (error := next(outcomes)) is not None:
            raise error
        assert set(addresses) == {"n1"}
        followed.set()

    driver, peers = Mock(core=core), Mock(set_peers=set_peers)
    driver.handle = lambda event: core.handle(event, 0.0)
    follower = RingFollower(Mock(), driver, peers, Mock(), asyncio.get_running_loop(), encrypted=False)
    follower.follow(Members(alone.with_member("n1", 1 << 16), {"n1": Address("127.0.0.1", 9)}))
    await asyncio.wait_for(followed.wait(), 10.0)
    assert set(core.record.members) == {"n0", "n1"}
    await follower.close()
