"""The control planes that a router asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.live import LAYOUT
from tokenlake.errors import DeadlinePassed
from tokenlake_client.routers.doors import LATE_CALLS, Door
from tokenlake_proto.v1 import scheduling_pb2 as pb

pytestmark = pytest.mark.rest


def test_a_layout_of_a_newer_version_leaves_the_others_in_use() -> None:
    listed = [pb.Layout(fingerprint=b"newer", encoded=b"?"), pb.Layout(fingerprint=b"known", encoded=LAYOUT.encode())]
    control: Any = SimpleNamespace(layouts=lambda: listed)
    door = Door("a", lambda: control)
    door.look()
    assert door.usable, door.problem
    assert door.layouts == ((b"known", LAYOUT),)


def test_one_late_call_leaves_the_door_in_use() -> None:
    """A request may take long by itself. Several in a row are the fault of the pool."""

    control: Any = SimpleNamespace(layouts=lambda: [], start=lambda message: pb.GetStartResponse())
    door = Door("a", lambda: control)
    door.look()
    for _ in range(2):
        for _ in range(LATE_CALLS - 1):
            door.failed(DeadlinePassed("late"))
        assert door.usable
        door.start(pb.GetStartRequest())
    for _ in range(LATE_CALLS):
        door.failed(DeadlinePassed("late"))
    assert not door.usable
    door.look()
    assert door.usable
