"""The commands of `docs/tutorial.md` run as they stand there, and engines print what the page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenlake_testing.ports import reserve_port

pytestmark = [pytest.mark.live, pytest.mark.rest, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
LINE = re.compile(r"([\d,]+) tokens, ([\d,]+) of them from the pool, in [\d.]+ s: answer ([0-9a-f]{8})")
LIMIT_S = 240


def parts(lines: list[tuple[str, str, str]]) -> list[tuple[str, str, int]]:
    """The tokens of each line, and in place of its answer the first line with the same one: digests of floating-point
    numbers differ between machines."""
    answers = [answer for *_, answer in lines]
    return [(tokens, found, answers.index(answer)) for tokens, found, answer in lines]


def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    """Ports are replaced, since other daemons may have these, and the installation is left out."""
    page = PAGE.read_text()
    blocks = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "pip install" not in block]
    script = "".join(blocks)
    for port in ("7440", "7441", "7450", "7451"):
        assert port in script
        script = script.replace(port, str(reserve_port()))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    environ["TOKENLAKE_SUSPECT_MS"] = "20000"  # other tests may take the processors
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=LIMIT_S)
        finally:
            # The daemons are children of the shell, which ends them only if it gets that far.
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    assert parts(LINE.findall(printed)) == parts(LINE.findall(page)), printed
    assert "no problem was found" in printed
    assert "never stored" in printed
    assert "unreachable for" in printed
    assert "more: docs/operations/runbook.md#peers-are-not-connected" in printed
    assert re.search(r'"ready": ?true', printed)
    assert "without the pool: no daemon listens" in printed
