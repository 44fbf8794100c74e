"""The soak's parts: its faults, its load, the comparison of gauges, and its detection of wrong bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_bench.soak.command import Claim, SoakArguments, SoakResult, flat_claim, tables
from tokenlake_bench.soak.engine import SoakEngine
from tokenlake_bench.soak.faults import LONGEST_S, REST_S, FaultKind, Target, schedule
from tokenlake_bench.soak.gauges import Gauge, Tolerance, compared
from tokenlake_bench.soak.load import (
    GROUPS,
    HEAD_SEGMENTS,
    HEADS,
    PROMPTS,
    SEGMENT_TOKENS,
    fresh_prompt,
    prompt,
)
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

TARGETS = [Target("node0", False), Target("node1", True), Target("engine 0.1", True)]


def test_faults_depend_on_the_seed_and_leave_time_to_recover() -> None:
    faults = schedule(TARGETS, 600, 3, seed=1)
    assert faults == schedule(TARGETS, 600, 3, seed=1)
    assert faults != schedule(TARGETS, 600, 3, seed=2)
    assert {(fault.target, fault.kind) for fault in faults} == {
        ("node0", FaultKind.STOP),
        *((name, kind) for name in ("node1", "engine 0.1") for kind in FaultKind),
    }
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(fault.at_s > 5 and fault.at_s + fault.for_s < 595 and fault.for_s <= LONGEST_S for fault in faults)
    for target in TARGETS:
        mine = [fault for fault in faults if fault.target == target.name]
        assert all(b.at_s - a.at_s - a.for_s >= REST_S for a, b in itertools.pairwise(mine))


def test_prompts_share_heads_and_nothing_else() -> None:
    identity = PayloadIdentity(1, "red", b"layout")
    digests = [identity.digests(prompt(1, number), SEGMENT_TOKENS) for number in range(PROMPTS)]
    assert identity.digests(prompt(1, 3), SEGMENT_TOKENS) == digests[3]
    assert identity.digests(prompt(2, 3), SEGMENT_TOKENS) != digests[3]
    assert digests[3][:HEAD_SEGMENTS] == digests[3 + HEADS][:HEAD_SEGMENTS]
    distinct = {digest for each in digests for digest in each}
    assert len(distinct) == sum(map(len, digests)) - HEAD_SEGMENTS * (PROMPTS - HEADS)
    assert not distinct & set(identity.digests(fresh_prompt(1, 0, 8), SEGMENT_TOKENS))
    assert len({group.layout.segment_bytes for group in GROUPS}) == 2


def gauge(values: list[float], tolerance: float = 3.0) -> Gauge | None:
    """The comparison of a gauge with one sample per second."""
    samples = [(float(at), value) for at, value in enumerate(values)]
    return compared("node0", "threads", samples, Tolerance(tolerance))


def test_a_leak_is_told_from_noise() -> None:
    noise = np.random.default_rng(1)
    level = 50.0 + noise.normal(0, 1, 300)
    spikes = level + (noise.random(300) < 0.2) * 100
    warming = level + 500 * np.exp(-np.arange(300) / 20) * -1
    falling = level - 0.05 * np.arange(300)
    for name, values in {"level": level, "spikes": spikes, "warming up": warming, "falling": falling}.items():
        found = gauge(values.tolist())
        assert found is not None, name
        assert found.flat, (name, found)
    leak = gauge((spikes + 0.05 * np.arange(300)).tolist())
    assert leak is not None
    assert not leak.flat
    assert leak.least_per_hour == pytest.approx(3600 * 3.0 / 100, rel=0.05), "the halves' centres are 100 s apart"


def test_too_few_samples_tell_nothing() -> None:
    assert gauge([]) is None
    assert gauge([1.0] * 12) is None
    assert flat_claim("threads", []).holds is None


def test_a_claim_fails_for_one_process_that_grows() -> None:
    flat, growing = gauge([50.0] * 100), gauge([float(at) for at in range(100)])
    assert flat is not None
    assert growing is not None
    assert flat_claim("threads", [flat]).holds
    assert flat_claim("threads", [flat, growing]).holds is False


def test_the_tables_have_every_claim_and_every_gauge() -> None:
    good, bad, open_ = Claim("this", "1", True), Claim("that", "2", False), Claim("other", "3", None)
    flat = gauge([50.0] * 100)
    assert flat is not None

    def result(*claims: Claim) -> SoakResult:
        return SoakResult(
            seconds=100.0,
            seed=1,
            nodes=2,
            interrupted=False,
            claims=list(claims),
            gauges=[flat],
            faults={"kill -9 daemon": 1},
            done={"requests": 10},
        )

    assert result(good).passed
    assert not result(good, bad).passed
    assert not result(good, open_).passed, "an undecided claim is no success"
    console = Console(width=80)
    with console.capture() as capture:
        console.print(tables(result(good, bad)))
    words = capture.get()
    assert all(word in words for word in ("this", "FAILS", "node0", "kill -9 daemon"))


@pytest.mark.parametrize(
    ("field", "value"), [("minutes", 0), ("rate", float("inf")), ("fault_every", -1), ("nodes", 1)]
)
def test_invalid_arguments_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{field.replace('_', '-')}'"):
        SoakArguments(**{field: value})  # type: ignore[arg-type]


@pytest.mark.live
def test_an_engine_finds_bytes_that_were_changed(tmp_path: Path) -> None:
    file = tmp_path / "engine.jsonl"
    layout = GROUPS[0].layout
    with Cluster(1, "8MiB", "1MiB") as cluster, Pool.connect(cluster.nodes[0].socket, layout) as pool:
        engine = SoakEngine(pool, 1, "engine", 200.0, file)
        engine.work(3.0)
        engine.drain()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["drained"] for line in lines] == [False, True]
        done = Counter(lines[0]["counts"]) + Counter(lines[1]["counts"])
        assert done["segments compared"] > 100
        assert done["segments compared after a hold"] > 0
        regions = pool.link.regions
        for number in range(8):
            # A region that the tenant has not got is refused.
            with contextlib.suppress(TokenLakeError):
                slots = regions.get(number, write=True).slots
                np.invert(slots, out=slots)
        engine.work(3.0)
        engine.drain()
    wrong = [line for line in map(json.loads, file.read_text().splitlines()) if "wrong" in line]
    assert {line["wrong"] for line in wrong} == {"serve", "copy", "hold", "held views"}
    assert all(line["segments"] > 0 and line["bytes"] > 0 for line in wrong)
