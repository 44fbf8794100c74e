"""Loads that were promised to vLLM reach the ranks, and end, when any call of the pool raises."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.fakes import FakePool
from tests.connector.side import Bench, know, request

LOADED = 32


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("it is broken")


def promised() -> tuple[Bench, Any]:
    """A request that was given blocks for the load of `LOADED` tokens."""
    bench, one = Bench(), request(40)
    know(bench, one, ["here"] * 4)
    assert bench.place(one) == LOADED
    return bench, one


@pytest.mark.parametrize("where", ["connected", "session", "incarnation"])
def test_a_step_hands_out_its_loads_when_the_pool_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is lost leaves its request waiting for ever, or computing with blocks that were never filled."""
    bench, one = promised()
    monkeypatch.setattr(FakePool, where, property(broken, lambda pool, value: None), raising=False)
    plan = bench.step(one, LOADED, 8)
    assert [(load.request, len(load.blocks)) for load in plan.loads] == [("r", LOADED // 4)]
    assert plan.session == 0
    assert "planning a step" in bench.reported


def test_a_connection_that_fails_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, one = promised()
    # `SchedulerSide` gets its pool from the test's bench.
    monkeypatch.setattr(Bench, "there", property(broken, lambda bench, value: None), raising=False)
    plan = bench.step(one, LOADED, 8)
    assert len(plan.loads) == 1


def test_saves_of_finished_requests_outlast_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of a finished request until its save job is reported as done."""
    bench, one = Bench(), request(33)
    bench.place(one)
    one.num_computed_tokens = 33
    assert bench.end(one)[0]
    with monkeypatch.context() as patch:
        patch.setattr(FakePool, "connected", property(broken, lambda pool, value: None), raising=False)
        assert bench.idle().saves == ()
    plan = bench.idle()
    assert [request for request, _ in plan.held] == ["r"]
    assert [save.request for save in plan.saves] == ["r"]


def test_a_lease_that_cannot_be_released_ends_no_other_load_late(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    loads = [request(40, name, 100 * number) for number, name in enumerate("ab")]
    for one in loads:
        know(bench, one, ["here"] * 4)
        assert bench.place(one) == LOADED
    bench.idle()
    monkeypatch.setattr("tests.connector.fakes.FakeLease.release", broken)
    bench.report(0, ["a", "b"])
    assert bench.reported.count("releasing a lease") == 2
    assert bench.idle().loads == ()
    bench.side.close()
