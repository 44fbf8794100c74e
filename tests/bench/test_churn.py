"""`bench churn`: its figures, and a short run with real daemons and etcd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.churn import command
from tokenlake_bench.churn.command import ChurnArguments, run_churn
from tokenlake_bench.churn.load import FIXED_PROMPTS, Request, Workload
from tokenlake_bench.churn.results import findable, keys_moved_ratio, p99_ms, rate
from tokenlake_testing.etcd import etcd_version


def request(number: int, found: int, *, fixed: bool = True, match_ms: float = 1.0) -> Request:
    return Request(0.0, fixed, number, 8, found, match_ms, 0)


def arguments(**changed: object) -> ChurnArguments:
    values: dict[str, object] = {
        "nodes": 3,
        "changes": ("join",),
        "rounds": 1,
        "rate": 20.0,
        "change_s": 3.0,
        "encrypt": True,
        "seed": 3,
        "json_file": None,
        "plot_file": None,
    }
    return ChurnArguments(**{**values, **changed})  # type: ignore[arg-type]


def test_findable_counts_what_was_found_before() -> None:
    before = [request(1, 8), request(2, 4), request(3, 0)]
    assert findable(before, [request(1, 8), request(2, 8), request(3, 8), request(4, 0)]) == 1.0
    assert findable(before, [request(1, 2), request(2, 4)]) == 0.5
    assert findable(before, [request(1, 0, fixed=False)]) == 1.0
    assert findable([], []) == 1.0


def test_rates_and_quantiles() -> None:
    requests = [request(1, 8), request(2, 4), request(3, 2, fixed=False)]
    assert rate(requests, fixed=True) == 0.75
    assert rate(requests, fixed=False) == 0.25
    assert rate([], fixed=True) == 0.0
    assert p99_ms([request(1, 8, match_ms=float(number)) for number in range(200)]) == 198.0
    assert p99_ms([]) == 0.0


def test_keys_that_a_change_moves() -> None:
    three = ["a", "b", "c"]
    assert keys_moved_ratio(three, three) is None
    for after in ([*three, "d"], three[:2]):
        moved = keys_moved_ratio(three, after)
        assert moved is not None
        assert 0.6 < moved < 1.4


def test_every_prompt_of_the_fixed_half_is_asked_for() -> None:
    workload = Workload(1)
    drawn = [workload.draw() for _ in range(3 * FIXED_PROMPTS)]
    assert {number for fixed, number in drawn if fixed} == set(range(FIXED_PROMPTS))
    assert all(number >= FIXED_PROMPTS for fixed, number in drawn if not fixed)


@pytest.mark.parametrize(
    ("field", "value"), [("nodes", 2), ("nodes", 17), ("rounds", 0), ("rate", 0.0), ("change_s", 0.0)]
)
def test_arguments_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field.replace("_", "-")):
        arguments(**{field: value})


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BEFORE_S", "AFTER_S"):
        monkeypatch.setattr(command, name, 3.0)
    written = {"json_file": tmp_path / "churn.json", "plot_file": tmp_path / "churn.png"}
    results = run_churn(arguments(changes=("join", "drain"), **written), Console(quiet=True))
    assert [each.change for each in results] == ["join", "drain"]
    assert [entry["change"] for entry in json.loads(written["json_file"].read_text())] == ["join", "drain"]
    assert written["plot_file"].read_bytes().startswith(b"\x89PNG")
    for each in results:
        assert each.wrong_bytes == 0
        assert each.evicted == 0
        assert each.token_hit_rate_after > 0
        assert each.findable_during > 0.9
        assert each.findable_after > 0.9
        assert each.directory_keys_moved_ratio is not None
