"""One minute of the soak; `tokenlake bench soak --minutes 60` is the long form."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.robustness.live import wait_until
from tokenlake_bench.soak.command import SoakArguments, run_soak
from tokenlake_testing.children import start_child

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.nightly]

SEED = 1


@pytest.mark.timeout(600)
def test_a_minute_of_load_with_kills_and_stops() -> None:
    """The output has the seed and the command that repeats the run."""
    result = run_soak(SoakArguments(minutes=1.0, seed=SEED, nodes=3, rate=10.0, fault_every=2.5))
    assert [(claim.text, claim.found) for claim in result.claims if not claim.holds] == []
    assert {"kill -9 daemon", "kill -9 engine", "SIGSTOP daemon", "SIGSTOP engine"} == set(result.faults)
    assert result.done["segments compared after a hold"] > 0
    assert result.done["segments from other nodes"] > 0


@pytest.mark.timeout(300)
def test_an_interruption_ends_the_load_and_writes_results(tmp_path: Path) -> None:
    arguments = ["bench", "soak", "--minutes", "60", "--seed", str(SEED)]
    files = ["--json", str(tmp_path / "soak.json")]
    command = [sys.executable, "-c", "from tokenlake.command import main; main()", *arguments, *files]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert "bench soak --minutes 60 --seed 1" in process.stdout.readline()
            parent = psutil.Process(process.pid)
            wait_until(lambda: len(parent.children()) == 12, "three daemons and nine engines")
            children = parent.children()
            process.send_signal(signal.SIGINT)
            output = process.stdout.read()
            process.wait()
        finally:
            process.terminate()
    assert process.returncode == 1, "the run is too short to decide whether anything grows"
    assert "interrupted: FAILED" in output
    result = json.loads((tmp_path / "soak.json").read_text())
    verdicts = {claim["text"]: claim["holds"] for claim in result["claims"]}
    assert verdicts["every slot of the first daemon takes another segment"] is True
    assert verdicts["threads flat"] is None
    assert "UNDECIDED" in output
    assert not [child for child in children if child.is_running()], "a child process still runs"
