"""The requests under way of routers: within bounds, and forgotten when their router is."""

from __future__ import annotations

import pytest

from tokenlake.config import Tenant
from tokenlake.errors import LimitReached
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Request
from tokenlake.planner.router import Prefill, Start

pytest.importorskip("grpc")

from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control import fleets
from tokenlake_server.control.fleets import Fleet, Fleets

TENANT = Tenant(name="red", secret=b"x" * 32)


def message(name: str = "f", **instances: str) -> pb.Fleet:
    return pb.Fleet(
        name=name,
        instances=instances or {"a": "n0"},
        layers=2,
        segment_bytes=1024,
        segment_tokens=16,
        query_bytes=64,
    )


def request(name: str, segments: int = 2) -> Request:
    keys = tuple(SegmentKey(f"{name} {number}".encode().ljust(32)) for number in range(segments))
    return Request(name=name, keys=keys, tokens=segments * 16 + 1)


def start(instance: str = "a") -> Start:
    return Start(instance, 0.0, Prefill(1, 0), 0, 0)


def fleet(all_: Fleets | None = None, now: float = 0.0, name: str = "f") -> Fleet:
    found, _, _ = (Fleets() if all_ is None else all_).update("red", message(name), now)
    return found


def test_the_oldest_requests_count_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MAX_UNDER_WAY", 3)
    one = fleet()
    for number in range(5):
        one.sent(request(str(number)), start(), 0.0)
        one.router.check_integrity()
    assert len(one) == 3
    assert [one.router.instance_of(str(number)) for number in range(5)] == [None, None, "a", "a", "a"]


def test_long_prompts_count_by_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MAX_SEGMENTS", 10)
    one = fleet()
    for number in range(4):
        one.sent(request(str(number), 4), start(), 0.0)
    assert len(one) == 2
    one.sent(request("longer than all", 20), start(), 0.0)
    assert len(one) == 1
    one.finished("longer than all")
    assert len(one) == 0
    one.router.check_integrity()


def test_a_choice_that_its_router_has_given_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router whose wait ended reports the end of the request, which may overtake its delayed `GetStart`."""
    monkeypatch.setattr(fleets, "MAX_ENDED", 3)
    one = fleet()

    def end(name: str, now: float) -> None:
        one.happened(pb.Happened(finished=name), TENANT, 16, now)

    end("r", 0.0)
    one.chosen(request("r"), start(), 1.0)
    assert len(one) == 0
    one.chosen(request("r"), start(), 2.0)
    assert len(one) == 1, "a later request of that name is counted"
    end("r", 3.0)
    assert len(one) == 0
    one.chosen(request("r"), start(), 4.0)
    assert len(one) == 1, "the end of a request that was under way belongs to no other one"
    end("r", 5.0)
    end("late", 6.0)
    one.chosen(request("late"), start(), 6.0 + fleets.ENDED_S + 1)
    assert len(one) == 1
    end("late", 7.0)
    for number in range(4):
        end(f"early {number}", 8.0)
    for number in range(4):
        one.chosen(request(f"early {number}"), start(), 8.0)
    assert len(one) == 1, "the oldest end was forgotten"
    end("x" * 257, 9.0)
    one.chosen(request("x" * 257), start(), 9.0)
    assert len(one) == 2, "a name that no request may have is not kept"
    one.router.check_integrity()


def test_requests_of_a_router_that_died_expire() -> None:
    all_ = Fleets()
    one = fleet(all_)
    one.sent(request("r"), start(), 0.0)
    assert len(fleet(all_, fleets.UNDER_WAY_S - 1)) == 1
    assert len(fleet(all_, fleets.UNDER_WAY_S + 1)) == 0


def test_an_instance_that_leaves_takes_its_requests_along() -> None:
    all_ = Fleets()
    one, _, _ = all_.update("red", message(a="n0", b="n1"), 0.0)
    one.sent(request("r"), start("a"), 0.0)
    one.sent(request("s"), start("b"), 0.0)
    one.happened(pb.Happened(gone="a"), TENANT, 16, 0.0)
    assert len(one) == 1
    # A restarted instance on another node has nothing under way.
    all_.update("red", message(b="n2"), 0.0)
    assert len(one) == 0
    assert one.router.instances["b"] == NodeId("n2")
    one.router.check_integrity()


def test_fleets_are_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MAX_FLEETS", 2)
    all_ = Fleets()
    first = fleet(all_, name="one")
    other = all_.update("blue", message("one"), 0.0)[0]
    assert other is not first
    second = fleet(all_, name="two")
    assert fleet(all_, name="one") is first
    fleet(all_, name="three")
    assert len(all_) == 3
    assert fleet(all_, name="one") is first
    assert all_.update("blue", message("one"), 0.0)[0] is other, "another tenant's fleets end none"
    assert fleet(all_, name="two") is not second
    with pytest.raises(LimitReached, match="2001 instances"):
        all_.update("red", message("one", **{f"i{number}": "n0" for number in range(2000)}), 0.0)
