"""Which steps tell how long a prefill takes, and when their time is known."""

from __future__ import annotations

import pytest

from tokenlake.planner import PrefillFit
from tokenlake_client.engines.vllm.entry import Scheduled
from tokenlake_client.engines.vllm.plan import LoadTime, StepReport
from tokenlake_client.engines.vllm.timing import PENDING, Prefills, StepWatch


class Device:
    """Marks are numbered; the device has come as far as `reached`."""

    def __init__(self) -> None:
        self.marks = 0
        self.reached = 1 << 30

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def between(self, first: int, last: int) -> float | None:
        return None if last > self.reached else float(last - first)


def part(new: int, computed: int = 0) -> Scheduled:
    return Scheduled("r", computed, new, (), whole=False)


def test_a_step_counts_from_its_last_start_to_its_first_stop() -> None:
    device = Device()
    watch = StepWatch(device)
    watch.start()
    device.mark()
    watch.start()
    watch.stop(1)
    watch.stop(1)
    assert watch.take() == {1: 1.0}
    assert watch.take() == {}


def test_a_time_is_known_when_the_device_has_come_so_far() -> None:
    device = Device()
    device.reached = 2
    watch = StepWatch(device)
    for step in range(1, 4):
        watch.start()
        watch.stop(step)
    assert watch.take() == {1: 1.0}
    device.reached = 6
    assert watch.take() == {2: 1.0, 3: 1.0}
    device.reached = 0
    for step in range(100):
        watch.start()
        watch.stop(step)
    device.reached = 1 << 30
    assert len(watch.take()) == PENDING


def test_prompts_alone_and_together_and_beside_decodes_have_one_fit() -> None:
    fit = PrefillFit()
    prefills = Prefills(fit, lambda: 0.0)
    steps = [
        [part(100)],
        [part(300)],
        [part(200, 400)],
        [part(300, 1000)],
        [part(50, 100), part(80)],
        [part(100), part(1, 500), part(1, 700)],
        [part(10, 2000)],
        [part(400, 100), part(1, 900)],
    ]

    def seconds(parts: list[Scheduled]) -> float:
        pairs = sum(one.new * (one.computed + one.new / 2) for one in parts)
        return 0.01 + 1e-3 * sum(one.new for one in parts) + 2e-7 * pairs + 1e-6 * sum(one.computed for one in parts)

    for step, parts in enumerate(steps):
        assert not fit.known
        prefills.begins(step, parts)
        prefills.took(step, seconds(parts))
    assert fit.known
    assert fit.seconds(1000, 0) == pytest.approx(0.01 + 1.0 + 0.1, rel=1e-3)
    assert fit.coefficients == pytest.approx((0.01, 1e-3, 2e-7, 1e-6), rel=1e-2)


def test_decodes_are_no_samples_and_a_step_counts_once() -> None:
    fit = PrefillFit()
    prefills = Prefills(fit, lambda: 0.0)
    for step in range(20):
        # Nothing but decodes; more decodes than prompt; nothing at all.
        prefills.begins(step, [[part(1, 100)], [part(3), *[part(1, 100)] * 4], []][step % 3])
        prefills.took(step, 1.0)
    assert not fit.known
    for step in range(20, 28):
        prefills.begins(step, [part(10)])
        assert not fit.known
        prefills.took(step, 1.0)
        prefills.took(step, 1.0)
    assert fit.known


def test_the_slowest_rank_counts() -> None:
    first = StepReport(3, 7, computed={2: 1.0, 3: 4.0}, loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0)})
    second = StepReport(4, 5, computed={3: 2.0, 4: 1.0}, loaded={"b": LoadTime(1, 2), "c": LoadTime(0, 1)})
    both = StepReport(
        3,
        5,
        computed={2: 1.0, 3: 4.0, 4: 1.0},
        loaded={"a": LoadTime(1, 1), "b": LoadTime(5, 0), "c": LoadTime(0, 1)},
    )
    assert first.merged(second) == both
    assert second.merged(first) == both
