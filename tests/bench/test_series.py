"""Pictures of several simulated results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake_bench.simulation.command import SimulateArguments, simulate
from tokenlake_bench.simulation.results import SimulatedResult
from tokenlake_bench.simulation.series import PANELS, main, plot_series


@pytest.fixture(scope="module")
def result() -> SimulatedResult:
    found, _ = simulate(SimulateArguments(limit=20), Console(quiet=True))
    assert found is not None
    return found


@pytest.mark.parametrize("over", list(PANELS))
def test_results_are_drawn_over_what_differs(over: str, result: SimulatedResult, tmp_path: Path) -> None:
    more = msgspec.structs.replace(result, **{over: 2 * getattr(result, over)})
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, each in zip(files, (result, more), strict=True):
        path.write_bytes(msgspec.json.encode(each))
    plot = tmp_path / "series.png"
    done = CliRunner().invoke(main, ["--over", over, "--plot", str(plot), *map(str, files)])
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_result_is_refused_by_name(result: SimulatedResult, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = CliRunner().invoke(main, ["--over", "rate", "--plot", str(tmp_path / "a.png"), str(other)])
    assert done.exit_code == 1
    assert "other.json" in done.output
    with pytest.raises(ConfigurationError, match="plot"):
        plot_series([result], "rate", tmp_path / "a.svg")
    with pytest.raises(ConfigurationError, match="over"):
        plot_series([result], "colour", tmp_path / "a.png")
