"""The configuration files of `docs/operations.md` are those of a cluster that starts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, Prompt, outcomes, read, store, wait_until
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import parse_metrics
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_two_nodes_of_the_page_connect(tmp_path: Path) -> None:
    """The page's ports and sizes are replaced, since other daemons may have these ports, and the machine less
    memory."""
    files = dict(re.findall(r"```toml\n# ([ab])\.toml\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert sorted(files) == ["a", "b"]
    named = set(re.findall(r"127\.0\.0\.1:([0-9]+)", "".join(files.values())))
    ports = {port: str(reserve_port()) for port in named}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    with contextlib.ExitStack() as stack:
        daemons = {}
        for node, text in files.items():
            file = tmp_path / f"{node}.toml"
            file.write_text(re.sub(r"(?<=127\.0\.0\.1:)[0-9]+", lambda match: ports[match[0]], text))
            log = stack.enter_context((tmp_path / f"{node}.log").open("wb"))
            command = [sys.executable, "-m", "tokenlake_server", "--config", str(file), "--memory", "4MiB"]
            # The default path of the socket depends on the user of the test.
            command += ["--socket", str(tmp_path / f"tokenlake-{node}.sock")]
            daemons[node] = stack.enter_context(
                subprocess.Popen([*command, "--region-size", "1MiB"], stdout=log, stderr=log, env=environment)
            )
            stack.callback(daemons[node].kill)

        def connected(node: str) -> bool:
            assert daemons[node].poll() is None, (tmp_path / f"{node}.log").read_text()
            (address,) = re.findall(r'metrics = "(.*)"', (tmp_path / f"{node}.toml").read_text())
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
                return parse_metrics(page.read().decode())["tokenlake_peers_connected"] == 1
            return False

        for node in daemons:
            wait_until(lambda node=node: connected(node), f"{node} found the other")  # type: ignore[misc]
        for seed, node in enumerate(daemons):
            with Pool.connect(tmp_path / f"tokenlake-{node}.sock", LAYOUT, deadlines=PATIENT) as pool:
                prompt = Prompt(seed, 3)
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
                assert read(pool, prompt) == 3
        for daemon in daemons.values():
            daemon.terminate()
            assert daemon.wait(LIMIT_S) == 0
