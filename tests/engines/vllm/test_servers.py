"""Two OpenAI servers, started as users start them, share the pool, and serve prompts apart behind vLLM's router."""

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
from tests.robustness.live import wait_until
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import ENVIRONMENT
from tokenlake_testing.ports import reserve_port
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.alone, pytest.mark.timeout(400)]

START_S = 240.0
TIMEOUT_S = 60.0
ROUTER = Path(__file__).parents[3] / ".venv-routers" / "bin" / "vllm-router"
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
    """One `vllm serve`, with the one flag, and its other settings in the environment. `socket`: of its daemon; None:
    without the flag."""

    def __init__(self, model: Path, socket: Path | None, log: Path) -> None:
        self.port = reserve_port()
        self.log = log
        settings = {f"TOKENLAKE_ENGINE_{name.upper()}": str(value) for name, value in PATIENT.items()}
        environment = {**os.environ, **ENVIRONMENT, **settings, "TOKENLAKE_ENGINE_SOCKET": str(socket or "")}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--port", str(self.port)]
        options += ["--model", str(model), "--served-model-name", "tiny"]
        options += ["--kv-transfer-config", FLAG] if socket is not None else []
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        with log.open("ab") as output:
            self.process = start_child([*command, *options], stdout=output, stderr=output, env=environment)

    def ready(self) -> None:
        wait_ready(f"http://127.0.0.1:{self.port}/health", self.process, self.log)

    def complete(self, tokens: list[int]) -> str:
        return completed(self.port, tokens)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            return totals(answer.read().decode())

    def close(self) -> None:
        end(self.process)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers at `url`."""
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.2)


def completed(port: int, tokens: list[int], *, stream: bool = False) -> str:
    """The answer of an OpenAI server to a prompt. Its text has the names of the tokens, because vLLM's router accepts
    no prompts of token ids."""
    text = " ".join(f"t{token}" for token in tokens)
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": stream}
    url, content = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), content), timeout=60) as answer:
        if not stream:
            found: Any = json.load(answer)
            return str(found["choices"][0]["text"])
        lines = [line[len(b"data: ") :] for line in answer.read().splitlines() if line.startswith(b"data: {")]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[list[Server]]:
    directory = tmp_path_factory.mktemp("servers")
    model = with_tokenizer(directory / "model")
    running = []
    try:
        for number in range(2):
            running.append(Server(model, cluster.nodes[0].socket, directory / f"{number}.log"))
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
    wait_until(lambda: cluster.totals()["tokenlake_stored_segments_total"] == 2 + 3 + 3, "all is stored", TIMEOUT_S)
    assert [second.complete(tokens) for tokens in prompts] == expected
    wait_until(lambda: cluster.tokens().get("local", 0) == 8 * 256, "all is supplied", TIMEOUT_S)
    # The servers' metrics pages count the same as the daemon.
    pages = [server.metrics() for server in servers]
    for source, tokens in (("this_node", [0, 8 * 256]), ("not_found", [2400, 2400 - 8 * 256])):
        assert [page[f'vllm:tokenlake_prompt_tokens_total{{source="{source}"}}'] for page in pages] == tokens
    assert [page["vllm:tokenlake_loaded_tokens_total"] for page in pages] == [0, 8 * 256]
    assert [page["vllm:tokenlake_requests_total"] for page in pages] == [3, 3]
    assert [page["vllm:tokenlake_copy_seconds_count"] for page in pages] == [0, 3]

    def all_counted() -> bool:
        # Writes that ended after the last step are counted by the next one.
        first.complete(prompt(2, 70))
        return first.metrics()["vllm:tokenlake_stored_tokens_total"] == 8 * 256

    wait_until(all_counted, "the stores are counted", TIMEOUT_S)
    for page in pages:
        assert page["vllm:tokenlake_failures_total"] == page["vllm:tokenlake_loads_failed_total"] == 0
        assert page["vllm:tokenlake_hook_seconds_total"] > 0


@pytest.fixture
def router(servers: list[Server], tmp_path: Path) -> Iterator[int]:
    """The port of vLLM's router, which sends prompts to the first server for prefill and to the second for decode."""
    if not ROUTER.exists():
        pytest.skip("vllm-router is not installed (`make install-routers`)")
    port, log = reserve_port(), tmp_path / "router.log"
    command = [str(ROUTER), "--vllm-pd-disaggregation", "--policy", "round_robin", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(reserve_port()), "--worker-startup-check-interval", "1"]
    for part, server in zip(("--prefill", "--decode"), servers, strict=True):
        command += [part, f"http://127.0.0.1:{server.port}"]
    with log.open("wb") as output:
        process = start_child(command, stdout=output, stderr=output)
    try:
        wait_ready(f"http://127.0.0.1:{port}/readiness", process, log)
        yield port
    finally:
        end(process)


def test_a_router_for_prefill_and_decode(servers: list[Server], router: int) -> None:
    """A router sends prompts to one server for prefill and to another for decode."""
    before = [server.metrics() for server in servers]
    # With those of the test before these are less than eight prompts, so the time of a prefill is not known, and the
    # second server waits long for the segments.
    lengths = [2, 256, 700, 1500]
    prompts = [prompt(length, 80 + length) for length in lengths]
    answers = [completed(router, tokens, stream=tokens is prompts[-1]) for tokens in prompts]
    # Another request may be told of the counts of a step.
    assert completed(router, prompt(2, 99))
    after = [server.metrics() for server in servers]
    growth = [
        {name: page[name] - then.get(name, 0.0) for name in page} for page, then in zip(after, before, strict=True)
    ]
    assert growth[0]["vllm:tokenlake_prefills_offered_total"] >= len(prompts)
    taken, recomputed = (growth[1][f"vllm:tokenlake_prefills_{each}_total"] for each in ("taken", "recomputed"))
    assert taken + recomputed >= len(prompts)
    # Beside busy programs the in-flight markers of the first server may arrive late.
    assert taken > recomputed
    assert recomputed or growth[1]["vllm:tokenlake_loaded_tokens_total"] >= sum(lengths) - len(prompts)
    # The first server has the cache of the prompts, and generates from it.
    assert [servers[0].complete(tokens) for tokens in prompts] == answers
    for page in growth:
        assert page["vllm:tokenlake_failures_total"] == page["vllm:tokenlake_loads_failed_total"] == 0
