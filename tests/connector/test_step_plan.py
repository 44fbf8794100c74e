"""Reports of several ranks are merged."""

from __future__ import annotations

from tokenlake_client.engines.vllm.step_plan import LoadTime, StepReport


def test_merged_reports_have_the_longer_times() -> None:
    first = StepReport(7, computed={2: 1.0, 3: 4.0}, loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0)})
    second = StepReport(5, computed={3: 2.0, 4: 1.0}, loaded={"b": LoadTime(1, 2), "c": LoadTime(0, 1)})
    both = StepReport(
        5,
        computed={2: 1.0, 3: 4.0, 4: 1.0},
        loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0), "c": LoadTime(0, 1)},
    )
    assert first.merged(second) == both
    assert second.merged(first) == both
