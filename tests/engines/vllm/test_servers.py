"""Two OpenAI servers, started as users start them, share the pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import PATIENT, TINY, prompt, totals
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import ENVIRONMENT
from tokenlake_testing.ports import reserve_port
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

START_S = 240.0
FLAG = json.dumps(
    {
        "kv_connector": "TokenLakeConnector",
        "kv_connector_module_path": "tokenlake_client.engines.vllm",
        "kv_role": "kv_both",
    }
)


def with_tokenizer(directory: Path) -> Path:
    """A model with a tokenizer whose tokens are t0, t1, ..., because a server answers with text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny_model(directory, TINY)
    words = {f"t{number}": number for number in range(TINY.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(directory)
    return directory


class Server:
    """One `vllm serve`, with the one flag, and its other settings in the environment."""

    def __init__(self, model: Path, socket: Path, log: Path) -> None:
        self.port = reserve_port()
        self.log = log
        settings = {f"TOKENLAKE_ENGINE_{name.upper()}": str(value) for name, value in PATIENT.items()}
        environment = {**os.environ, **ENVIRONMENT, **settings, "TOKENLAKE_ENGINE_SOCKET": str(socket)}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--port", str(self.port)]
        command = ["nice", "-n", "10", sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        with log.open("ab") as output:
            self.process = start_child(
                [*command, "--model", str(model), *options, "--kv-transfer-config", FLAG],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < until, self.log.read_text()[-3000:]
                time.sleep(0.2)

    def complete(self, tokens: list[int]) -> str:
        body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Any = json.load(answer)
        return str(found["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            return totals(answer.read().decode())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def servers(tmp_path: Path, cluster: Cluster) -> Iterator[list[Server]]:
    model = with_tokenizer(tmp_path / "model")
    running = []
    try:
        for number in range(2):
            running.append(Server(model, cluster.nodes[0].socket, tmp_path / f"{number}.log"))
        for server in running:
            server.ready()
        yield running
    finally:
        for server in running:
            server.close()


def test_one_server_reads_the_others_segments(servers: list[Server], cluster: Cluster) -> None:
    prompts = [prompt(700 + 100 * number, 60 + number) for number in range(3)]
    first, second = servers
    expected = [first.complete(tokens) for tokens in prompts]
    until = time.monotonic() + 30
    while cluster.totals()["tokenlake_stored_segments_total"] < 2 + 3 + 3:
        assert time.monotonic() < until, first.log.read_text()[-3000:]
        time.sleep(0.05)
    before = cluster.totals()["tokenlake_local_tokens_total"]
    assert [second.complete(tokens) for tokens in prompts] == expected
    assert cluster.totals()["tokenlake_local_tokens_total"] - before == 8 * 256
    # The servers' metrics pages count the same as the daemon.
    pages = [server.metrics() for server in servers]
    for source, tokens in (("this_node", [0, 8 * 256]), ("not_found", [2400, 2400 - 8 * 256])):
        assert [page[f'vllm:tokenlake_prompt_tokens_total{{source="{source}"}}'] for page in pages] == tokens
    assert [page['vllm:prompt_tokens_cached_by_source_total{source="host"}'] for page in pages] == [0, 8 * 256]
    assert [page["vllm:tokenlake_loaded_tokens_total"] for page in pages] == [0, 8 * 256]
    assert [page["vllm:tokenlake_requests_total"] for page in pages] == [3, 3]
    assert [page["vllm:tokenlake_copy_seconds_count"] for page in pages] == [0, 3]
    assert pages[0]["vllm:tokenlake_stored_tokens_total"] == cluster.totals()["tokenlake_stored_segments_total"] * 256
    for page in pages:
        assert page["vllm:tokenlake_failures_total"] == page["vllm:tokenlake_loads_failed_total"] == 0
        assert page["vllm:tokenlake_hook_seconds_total"] > 0
