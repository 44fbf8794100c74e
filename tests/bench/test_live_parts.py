"""The parts of a live run that need no daemon."""

from __future__ import annotations

import io

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokenlake.config import load_config
from tokenlake.config.values import LEAST_DISK_BYTES
from tokenlake.disk import slab_bytes
from tokenlake.errors import ConfigurationError
from tokenlake.memory.region import RegionShape
from tokenlake_bench.cache_hit import DEADLINES, CacheHitArguments
from tokenlake_bench.cli import bench
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.routes import ROUTES
from tokenlake_bench.sizing import bench_layout, disk_bytes, pool_size
from tokenlake_bench.workload import Request


@given(
    nodes=st.integers(1, 16),
    segments=st.integers(9, 100_000),
    segment_tokens=st.sampled_from([1, 16, 60, 64, 256, 512, 1000, 4096]),
    rest=st.integers(0, 1 << 20),
)
def test_memory_holds_as_many_segments_as_the_baselines(
    nodes: int, segments: int, segment_tokens: int, rest: int
) -> None:
    layout = bench_layout(segment_tokens)
    capacity = nodes * segments * segment_tokens
    size = pool_size(nodes, capacity + rest % (nodes * segment_tokens), layout)
    assert size.node_segments == segments
    assert size.capacity_tokens == capacity
    assert RegionShape(size.memory, layout.segment_bytes).slots == segments
    assert size.memory % 4096 == 0


def test_too_small_a_pool_is_refused_with_what_is_needed() -> None:
    layout = bench_layout(512)
    with pytest.raises(ConfigurationError, match=r"capacity_tokens.*at least 13824"):
        pool_size(3, 13_823, layout)
    assert pool_size(3, 13_824, layout).node_segments == 9


@pytest.mark.parametrize("name", ROUTES)
def test_routes_are_in_range_and_depend_on_the_seed(name: str) -> None:
    empty = np.empty(0, dtype=np.uint32)
    requests = [Request(index, 0.0, index // 4, empty, empty) for index in range(100)]
    first, second = ROUTES[name](3, 7), ROUTES[name](3, 7)
    chosen = [[first(each), second(each)] for each in requests]
    assert all(a == b for a, b in chosen)
    assert {a for a, _ in chosen} == {0, 1, 2}


def test_without_a_terminal_progress_is_a_line_per_tenth() -> None:
    out = io.StringIO()
    with LiveProgress(Console(file=out, width=80), "replaying", 50) as progress:
        for done in range(1, 51):
            progress.update(done, "fine")
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "replaying: 5 of 50, fine"
    assert lines[-1] == "replaying: 50 of 50, fine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--route", "nearest"], "setting 'route' is 'nearest'; expected round-robin or random or conversation"),
        (["--speed", "-1"], "setting 'speed' is -1.0"),
        (["--speed", "1001"], "setting 'speed' is 1001.0"),
        (["--limit", "0"], "setting 'limit' is 0"),
        (["--nodes", "0"], "setting 'nodes' is 0"),
        (["--segment-tokens", "0"], "setting 'segment_tokens' is 0"),
        (["--capacity-tokens", "100"], "setting 'capacity_tokens' is 100"),
        (["--disk-tokens", "100"], "setting 'disk_tokens' is 100"),
        (["--mode", "simulate", "--disk-directory", "/"], "setting 'disk_directory' is"),
        (["--plot", "x.svg"], "setting 'plot' is 'x.svg'"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(bench, ["cache-hit", *arguments])
    assert outcome.exit_code == 1
    last = outcome.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last


def test_the_size_of_a_disk() -> None:
    """A disk has the segments that are asked for and at least the size that a daemon takes."""
    for tokens, at_least in ((96_000, LEAST_DISK_BYTES), (96_000_000, 2 * LEAST_DISK_BYTES)):
        size = CacheHitArguments(nodes=3, capacity_tokens=24_000, segment_tokens=64, disk_tokens=tokens).size()
        assert size.capacity_tokens == 24_000
        nbytes = disk_bytes(tokens // 3, size.layout)
        assert nbytes >= at_least
        assert nbytes == slab_bytes(size.layout.segment_bytes, tokens // 3 // 64)


@pytest.mark.parametrize(
    ("speed", "asked", "given"),
    [(0.0, None, "0"), (0.0, 30.0, "30.0"), (2.0, None, None), (2.0, 0.0, "0"), (2.0, 30.0, "30.0")],
)
def test_the_budget_of_the_disks_holds_where_a_day_has_a_length(
    speed: float, asked: float | None, given: str | None
) -> None:
    options = CacheHitArguments(
        capacity_tokens=1, segment_tokens=1, speed=speed, disk_tokens=4, disk_writes_per_day=asked
    )
    assert options.settings().get("disk_writes_per_day") == given


@pytest.mark.parametrize("shipped", [False, True])
def test_deadlines_of_a_fast_replay_are_as_long_in_real_time(shipped: bool) -> None:
    def settings(speed: float) -> dict[str, str]:
        options = CacheHitArguments(capacity_tokens=1, segment_tokens=1, speed=speed, shipped_deadlines=shipped)
        return options.settings()

    def loaded(given: dict[str, str]) -> dict[str, float]:
        flags = {name: value for name, value in given.items() if name != "speed"}
        config = load_config(toml_text=None, environ={}, flags=flags, uid=0).config
        return {name: getattr(config, name) for name in DEADLINES}

    real = loaded(settings(0.0))
    assert "speed" not in settings(0.0)
    assert settings(12.0)["speed"] == "12.0"
    assert loaded(settings(12.0)) == {name: 12 * seconds for name, seconds in real.items()}
    assert loaded(settings(0.5)) == real
    loaded(settings(1000.0))  # raises if a value is out of the bounds of its setting
