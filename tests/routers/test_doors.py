"""The control planes that a router asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.live import LAYOUT
from tokenlake_client.routers.doors import Door
from tokenlake_proto.v1 import scheduling_pb2 as pb

pytestmark = pytest.mark.rest


def test_a_layout_of_a_newer_version_leaves_the_others_in_use() -> None:
    listed = [pb.Layout(fingerprint=b"newer", encoded=b"?"), pb.Layout(fingerprint=b"known", encoded=LAYOUT.encode())]
    control: Any = SimpleNamespace(layouts=lambda: listed)
    door = Door("a", lambda: control)
    door.look()
    assert door.usable, door.problem
    assert door.layouts == ((b"known", LAYOUT),)
