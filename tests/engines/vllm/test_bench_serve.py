"""`tokenlake bench serve` against real servers: with the pool at two nodes, without it, and one that is killed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.vllm.conftest import PATIENT_NODES
from tests.engines.vllm.test_servers import Server, with_tokenizer
from tests.robustness.live import wait_until
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.timeout(400)]

BENCH = Path(__file__).parents[3] / ".venv" / "bin" / "python"
"""The benchmarks are in the environment of the other tests, and not in vLLM's."""
TIMEOUT_S = 120.0
SIZES = ("--requests", "24", "--answer-tokens", "4", "--context", "2048", "--pause", "0.2")


class Fleet:
    """Two servers, each with the pool at its own node. They start one after the other."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.directory, self.cluster = directory, cluster
        self.model = with_tokenizer(directory / "model")
        self.servers: list[Server] = []

    def start(self, socket: Path | None) -> None:
        """A further server."""
        self.servers.append(Server(self.model, socket, self.directory / f"{len(self.servers)}.log"))
        self.servers[-1].ready()

    def urls(self, *numbers: int) -> list[str]:
        return [word for at in numbers for word in ("--url", f"http://127.0.0.1:{self.servers[at].port}")]

    def begin(self, *words: str) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """The command in a process of its own, its log, and the file of its result."""
        log, file = self.directory / "bench.log", self.directory / "result.json"
        file.unlink(missing_ok=True)
        code = "from tokenlake.command import main; main()"
        command = [str(BENCH), "-c", code, "bench", "serve", *words, "--save", str(file)]
        with log.open("wb") as output:
            return start_child(command, stdout=output, stderr=output, env=dict(os.environ)), log, file

    def measured(self, *words: str) -> dict[str, Any]:
        process, log, file = self.begin(*words)
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
        found: dict[str, Any] = json.loads(file.read_bytes())
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not BENCH.exists() or subprocess.run([BENCH, "-c", "import aiohttp, tokenlake_bench"]).returncode:
        pytest.skip("tokenlake-bench is not installed (`make install-dev`)")
    with Cluster(2, "128MiB", "16MiB", **PATIENT_NODES) as cluster:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), cluster)
        try:
            for node in cluster.nodes:
                fleet.start(node.socket)
            yield fleet
        finally:
            for server in fleet.servers:
                server.close()


def test_with_the_pool_the_tokens_add_up(fleet: Fleet) -> None:
    daemons = [word for node in fleet.cluster.nodes for word in ("--daemon", f"127.0.0.1:{node.metrics_port}")]
    result = fleet.measured(*fleet.urls(0, 1), *daemons, "--workload", "documents", "--concurrency", "1", *SIZES)
    assert (result["answered"], result["errors"], result["not_read"]) == (24, {}, {})
    assert result["settings"]["form"] == "completions, prompts of token ids below 512"
    tokens, asked = result["engines"], result["daemons"]
    assert tokens["prompt"] == result["prompt_tokens"] == asked["asked"]
    sources = tokens["own"] + tokens["pool_here"] + tokens["pool_elsewhere"] + tokens["other"] + tokens["computed"]
    assert sources == tokens["prompt"]
    assert (tokens["own"], asked["engine_had"]) == (asked["engine_had"], tokens["own"])
    assert tokens["pool_elsewhere"] > 0
    assert tokens["pool_here"] + tokens["pool_elsewhere"] == sum(asked["supplied"].values())
    assert sum(asked["supplied"].values()) + asked["engine_had"] + sum(asked["missed"].values()) == asked["asked"]


def test_chats_over_the_chat_api(fleet: Fleet) -> None:
    """Prompts are text; the tokenizer of the model has none of the words, so that all are one token."""
    words = ("--api", "chat", "--rate", "8", "--seed", "2", "--requests", "8", "--answer-tokens", "4")
    process, log, _ = fleet.begin(*fleet.urls(0), *words)
    assert process.wait(TIMEOUT_S) == 1, log.read_text()
    # The model has no chat template: vLLM says so, and the command passes it on.
    assert "chat template" in log.read_text()


def test_a_server_that_is_killed_in_the_middle(fleet: Fleet) -> None:
    words = ("--rate", "4", "--seed", "3", "--timeout", "20")
    process, log, file = fleet.begin(*fleet.urls(0, 1), *words, *SIZES)
    wait_until(lambda: " of 24" in log.read_text(), "some are answered", TIMEOUT_S)
    server = psutil.Process(fleet.servers[1].process.pid)
    for process_of_it in [server, *server.children(recursive=True)]:
        process_of_it.kill()
    assert process.wait(TIMEOUT_S) == 0, log.read_text()
    result = json.loads(file.read_bytes())
    assert result["servers"][0]["answered"] == 12
    assert 12 < result["answered"] < 24, log.read_text()
    assert result["errors"].keys() <= {"not reachable", "cut off"}
    assert [url for url in result["not_read"] if url.endswith("/metrics")]
    assert result["engines"] is None


def test_without_the_pool(fleet: Fleet) -> None:
    fleet.start(None)
    result = fleet.measured(*fleet.urls(2), "--workload", "chats", "--rate", "8", "--seed", "1", *SIZES)
    tokens = result["engines"]
    assert (result["answered"], result["daemons"], tokens["prompt"]) == (24, None, result["prompt_tokens"])
    assert (tokens["pool_here"], tokens["pool_elsewhere"], tokens["other"]) == (0, 0, 0)
    assert tokens["own"] + tokens["computed"] == tokens["prompt"]
    assert result["ttft"] is not None
    assert result["tpot"] is not None
