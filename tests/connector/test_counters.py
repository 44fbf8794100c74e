"""The counts of the sides of a connector, their growth from step to step, and the sum over the sides."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from tests.connector.side import SEGMENT, Bench, blocks_of, know, request
from tokenlake_client.engines.vllm.counters import (
    COUNTS,
    MAX_SAMPLES,
    PREFIX,
    TIMES,
    Counts,
    EngineCounters,
    Growth,
    Side,
    merge,
)


def test_growth_is_taken_once() -> None:
    counters = EngineCounters()
    assert counters.take(Side.SCHEDULER) == {}
    counters.add_request(100, 10, here=20, remote=30, skipped=8)
    counters.sample(copy_seconds=0.5)
    counters.sample(copy_seconds=0.25)
    assert counters.take(Side.SCHEDULER) == {
        "requests": 1,
        "tokens_local": 10,
        "tokens_hit_here": 20,
        "tokens_hit_remote": 30,
        "tokens_skipped_by_cost": 8,
        "tokens_not_found": 32,
        "copy_seconds": [0.5, 0.25],
    }
    assert counters.take(Side.SCHEDULER) == {}
    counters.add_request(7, 0, asked=False)
    assert counters.take(Side.SCHEDULER) == {"requests": 1, "tokens_not_asked": 7}
    counts = counters.read()
    assert (counts.tokens_asked, counts.tokens_hit) == (107, 50), "taking the growth leaves the sums"


def test_time_in_hooks_alone_is_not_reported_but_kept() -> None:
    """Each hook adds to it, so each step of an engine that decodes would send a message."""
    counters = EngineCounters()
    for _ in range(3):
        counters.add(hook_seconds=0.25)
        assert counters.take(Side.SCHEDULER) == {}
    counters.add(failures=1)
    assert counters.take(Side.SCHEDULER) == {"failures": 1, "hook_seconds": 0.75}


def test_each_side_reports_its_own_counts() -> None:
    """A load that failed is counted by the scheduler's side and by each rank, and tokens by each rank that loads them:
    on the metrics page they count once."""
    reports: list[Growth] = []
    for side in Side:
        counters = EngineCounters()
        if side is Side.SCHEDULER:
            counters.add(loads_failed=1)
        else:
            counters.add(loads_failed=1, tokens_loaded=512, tokens_stored=256, save_seconds=1.0)
        counters.add(failures=1, hook_seconds=0.5)
        reports.append(counters.take(side))
    total: Growth = {}
    for report in reports:
        merge(total, report)
    assert total == {
        "loads_failed": 1,
        "tokens_loaded": 512,
        "tokens_stored": 256,
        "failures": 3,
        "hook_seconds": 1.0,
        "save_seconds": 1.0,
    }


def test_merging_changes_only_the_sum() -> None:
    total: Growth = {}
    first: Growth = {"requests": 1, "copy_seconds": [1.0]}
    merge(total, first)
    merge(total, {"requests": 2, "copy_seconds": [3.0], "lookup_wait_seconds": [0.0]})
    assert total == {"requests": 3, "copy_seconds": [1.0, 3.0], "lookup_wait_seconds": [0.0]}
    assert first == {"requests": 1, "copy_seconds": [1.0]}


def test_samples_are_bounded() -> None:
    counters = EngineCounters()
    for number in range(MAX_SAMPLES + 10):
        counters.sample(copy_seconds=number)
    growth = counters.take(Side.SCHEDULER)
    assert len(growth["copy_seconds"]) == MAX_SAMPLES
    merge(growth, {"copy_seconds": [-1.0]})
    assert (len(growth["copy_seconds"]), growth["copy_seconds"][-1]) == (MAX_SAMPLES, -1.0)


def test_declarations() -> None:
    assert list(COUNTS) == [field.name for field in dataclasses.fields(Counts)]
    series = [count.series(PREFIX) for count in COUNTS.values()]
    assert len(series) == len(set(series))
    assert not TIMES.keys() & COUNTS.keys()
    assert all(
        text[0].islower() and text[-1] != "." for text in [*TIMES.values(), *(c.meaning for c in COUNTS.values())]
    )


def test_no_growth_is_lost_between_threads() -> None:
    counters, total = EngineCounters(), Growth()

    def add() -> None:
        for _ in range(2000):
            counters.add(failures=1)
            counters.sample(copy_seconds=1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        merge(total, counters.take(Side.SCHEDULER))
    merge(total, counters.take(Side.SCHEDULER))
    assert total["failures"] == 8000


# -- what the scheduler's side counts


def taken(bench: Bench) -> Growth:
    return bench.counters.take(Side.SCHEDULER)


def test_a_part_of_a_segment_of_another_node() -> None:
    bench, one = Bench(), request(SEGMENT + 5)
    know(bench, one, ["far"])
    assert bench.place(one, 4) == 4
    assert bench.side.remote_tokens("r") == 4


def test_tokens_without_an_answer_of_the_pool() -> None:
    bench = Bench()
    bench.there = False
    bench.place(request(40, "no daemon"))
    bench.there = True
    bench.place(request(SEGMENT - 1, "too short", 100))
    bench.pool.answers = False
    late = request(40, "late", 200)
    assert bench.ask(late) is None
    bench.now = 1.0
    assert bench.side.matched(late, 0) == 0
    bench.side.allocated(late, blocks_of(late), 0)
    assert taken(bench) == {
        "requests": 3,
        "tokens_not_asked": 40 + SEGMENT - 1 + 40,
        "lookups_late": 1,
        "lookup_wait_seconds": [1.0],
    }


def test_the_wait_for_a_lookup_is_sampled_once_per_placing() -> None:
    bench, one = Bench(), request(40)
    know(bench, one, ["here"])
    bench.pool.answers = False
    bench.side.new_request(one)
    bench.now = 0.010
    for _ in range(3):
        # The time before vLLM asks for the first time delays no request.
        assert bench.side.matched(one, 0) is None
        bench.now += 0.001
    bench.pool.answers = True
    for _ in range(2):
        assert bench.side.matched(one, 0) == SEGMENT
        bench.now += 0.001
    bench.side.allocated(one, blocks_of(one), SEGMENT)
    assert taken(bench)["lookup_wait_seconds"] == [pytest.approx(0.003)]
    # Preempted: the request is looked up again.
    bench.side.matched(one, 0)
    bench.side.allocated(one, blocks_of(one), SEGMENT)
    growth = taken(bench)
    assert (growth["lookup_wait_seconds"], growth["requests"]) == ([0.0], 1)
