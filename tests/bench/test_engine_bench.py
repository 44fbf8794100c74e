"""Parts of `tokenlake bench engine`: its arguments, two engines behind a router, and LMCache's server."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.engine.command import EngineArguments, _Pair, run_engine
from tokenlake_bench.engine.workload import Conversations
from tokenlake_testing.engine_lines import Timed
from tokenlake_testing.lmcache_server import LMCacheServer, check_lmcache

LIMIT_S = 60.0
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
def main():
    port = int(sys.argv[sys.argv.index("--http-port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
PARENT = """
import sys
from pathlib import Path
import psutil
from tokenlake_testing.lmcache_server import LMCacheServer
with LMCacheServer(sys.executable, 64, directory=Path(sys.argv[1])):
    print(psutil.Process().children()[0].pid, flush=True)
    sys.stdin.read()
"""


class FakeEngine:
    """Answers each prompt with a token of its own."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.prompts: list[tuple[int, int]] = []
        """The length of each prompt, and the number of tokens generated for it."""

    def timed(self, prompts: list[list[int]], tokens: int = 8) -> Timed:
        self.prompts.append((len(prompts[0]), tokens))
        return Timed([[self.token] * tokens], 0.25, 0)

    def call(self, command: str) -> Any:
        assert command == "counts"
        return {"hook_seconds": 0.01 * len(self.prompts)}


@pytest.fixture
def lmcache(tmp_path: Path) -> Path:
    """A directory as `make install-lmcache` makes it, with a server that only says that it is healthy."""
    package = tmp_path / "lmcache" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SERVER)
    return tmp_path


def test_lmcache_names_its_make_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="make install-lmcache"):
        run_engine(EngineArguments(against="none,lmcache"))
    with pytest.raises(ConfigurationError, match="make install-lmcache"):
        check_lmcache(tmp_path)


def test_a_conversation_alternates_between_engines() -> None:
    """The requests of a conversation alternate between the engines."""
    workload = Conversations(conversations=2, turns=3, systems=1, system_tokens=10, question_tokens=5)
    first, second = FakeEngine(1), FakeEngine(2)
    pair = _Pair("pool", (first, second), workload)  # type: ignore[arg-type]
    for turn in range(workload.turns):
        for number, question in enumerate(workload.questions(turn)):
            pair.serve(turn, number, question)
    assert [answer[0] for answer in pair.answers] == [1, 2, 2, 1, 1, 2]
    lengths = [15, 15 + 16 + 5, 15 + 2 * (16 + 5)]
    assert first.prompts == second.prompts == [(length, new) for length in lengths for new in (1, 16)]
    row = pair.row()
    assert (row["ttft_ms"], row["ttft_warm_ms"], row["answers_per_second"]) == (250.0, 250.0, 2.0)
    assert row["prompt_tokens"] == 2 * sum(lengths)
    assert row["connector_ms"] == pytest.approx(10.0)


def test_the_server_of_lmcache_ends_with_the_context(lmcache: Path) -> None:
    others = {process.pid for process in psutil.Process().children()}
    with LMCacheServer(sys.executable, 64, directory=lmcache) as server:
        (process,) = (each for each in psutil.Process().children() if each.pid not in others)
        assert server.transfer["kv_connector"] == "LMCacheMPConnector"
        assert server.environment["PYTHONPATH"].split(":")[0] == str(lmcache)
        assert "0.0625" in process.cmdline()
    assert not process.is_running()


def test_the_server_of_lmcache_ends_when_the_benchmark_is_killed(lmcache: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(lmcache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    assert server.is_running()
    parent.kill()
    parent.communicate()
    until = time.monotonic() + LIMIT_S
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_ends_at_its_start_shows_its_log(lmcache: Path) -> None:
    (lmcache / "lmcache" / "cli" / "main.py").write_text("raise SystemExit('no such option')")
    with pytest.raises(Unreachable, match="no such option"), LMCacheServer(sys.executable, 64, directory=lmcache):
        pass
