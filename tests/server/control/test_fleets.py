"""The requests under way of routers: within bounds, and forgotten when their router is."""

from __future__ import annotations

import tracemalloc

import pytest

from tokenlake.config import Secret, Tenant
from tokenlake.errors import LimitReached
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Request
from tokenlake.planner.router import Prefill, Start
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.scheduling import fleets
from tokenlake_server.scheduling.fleets import Fleet, Fleets

TENANT = Tenant(name="red", secret=Secret(b"x" * 32))


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


def test_names_have_a_length() -> None:
    """A scheduler could make the daemon keep 2 MiB for each name."""
    all_, long = Fleets(), "x" * 257
    for wrong in (message(long), message("f", **{long: "n0"}), message("f", a=long)):
        with pytest.raises(ValueError, match="257 characters"):
            all_.update("red", wrong, 0.0)
    assert len(all_) == 0
    all_.update("red", message(long[1:], **{long[1:]: long[1:]}), 0.0)


def test_a_tenant_keeps_no_more_than_its_part() -> None:
    """Each kind of state counts: instances, requests under way, and ends of requests."""
    all_ = Fleets(tenants=2, total=1 << 20)
    assert all_.share == 1 << 19
    other, _, _ = all_.update("blue", message("f"), 0.0)
    other.sent(request("r"), start(), 0.0)
    for number in range(40):
        instances = {f"{at}{'i' * 200}": f"{at}{'n' * 200}" for at in range(100)}
        one, _, _ = all_.update("red", message(f"{number}", **instances), float(number))
        for at in range(60):
            one.sent(request(f"r{at}", 16), start(next(iter(instances))), float(number))
            one.happened(pb.Happened(finished=f"{at}" + "e" * 200), TENANT, 16, float(number))
        all_.fit("red")
        assert all_.kept_bytes["red"] <= all_.share
        one.router.check_integrity()
    assert all_.update("red", message("39"), 40.0)[0] is one, "the fleet in use stays"
    assert len(other) == 1, "another tenant loses nothing"
    with pytest.raises(LimitReached, match="limit 'fleet_bytes' of the tenant is 524288"):
        all_.update("red", message("big", **{f"{at}{'i' * 240}": "n" * 240 for at in range(1000)}), 41.0)
    assert all_.update("red", message("39"), 42.0)[0] is one, "a refused call changes nothing"


def test_ends_of_a_single_fleet_are_within_the_part() -> None:
    """A router may report the ends of requests that were never sent, with long names."""
    all_ = Fleets(tenants=16, total=1 << 20)
    one, _, _ = all_.update("red", message(), 0.0)
    for at in range(200):
        one.happened(pb.Happened(finished=f"{at}" + "\N{SNOWMAN}" * 200), TENANT, 16, 0.0)
        all_.fit("red")
        assert all_.kept_bytes["red"] <= all_.share
    one.chosen(request("199" + "\N{SNOWMAN}" * 200), start(), 0.0)
    assert len(one) == 0, "the newest end is known"


def test_unused_fleets_and_instances_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ = Fleets()
    one, _, _ = all_.update("red", message("f", old="n0"), 0.0)
    all_.update("blue", message("f"), 0.0)
    one.sent(request("r"), start("old"), 10.0)
    all_.update("red", message("f", new="n0"), fleets.IDLE_S)
    assert set(one.router.instances) == {"old", "new"}
    all_.update("red", message("f", new="n0"), fleets.IDLE_S + 1)
    assert set(one.router.instances) == {"new"}
    assert one.instance_bytes > 0
    assert list(all_.kept_bytes) == ["red"], "a fleet that no call uses takes no memory"
    one.leave("new")
    assert one.instance_bytes == one.request_bytes == 0


def test_the_charge_covers_the_memory() -> None:
    """What is charged is at least what the objects take."""
    keys = [f"{at}".encode().ljust(32) for at in range(6000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        one = fleet()
        one.follow({f"instance {at}": NodeId(f"node {at}") for at in range(500)}, 0.0)
        for at in range(600):
            own = tuple(SegmentKey(bytes(key)) for key in keys[at * 10 : at * 10 + 10])
            named = Request(name=f"request {at}", keys=own, tokens=161)
            one.sent(named, start(f"instance {at % 500}"), 0.0)
            one.happened(pb.Happened(finished=f"end {at}"), TENANT, 16, 0.0)
        assert tracemalloc.get_traced_memory()[0] - before <= one.kept_bytes
    finally:
        tracemalloc.stop()
