"""vLLM's OpenAI servers with a tiny model whose words are t0, t1, ..."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tokenlake_bench.engine_families import PATIENCE
from tokenlake_bench.router.child import HttpChild
from tokenlake_testing.cluster import parse_metrics
from tokenlake_testing.engine_lines import ENVIRONMENT
from tokenlake_testing.ports import reserve_port
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model, save_tokenizer

MODEL_NAME: Final = "tiny"
MODEL: Final = TinyModel()
CONNECTOR: Final = json.dumps(
    {
        "kv_connector": "TokenLakeConnector",
        "kv_connector_module_path": "tokenlake_client.engines.vllm",
        "kv_role": "kv_both",
    }
)
SETTINGS: Final = {**PATIENCE, "fetch_ms": 2000.0}
SOURCES: Final = {"own cache": "local_cache_hit", "pool": "external_kv_transfer", "computed": "local_compute"}
"""Labels of vLLM's counter of prompt tokens, by the benchmark's names."""


def save_chat_model(directory: Path) -> Path:
    """Write the model with a tokenizer of which each word is one token."""
    save_tiny_model(directory, MODEL)
    return save_tokenizer(directory, MODEL.vocabulary)


class Counts(NamedTuple):
    """Counters of an engine since its start."""

    tokens: dict[str, float]
    """Prompt tokens by source."""
    first_token_s: float
    """Seconds from the arrival of a request to its first token, in sum."""
    cpu_s: float
    """Processor seconds."""

    def since(self, earlier: Counts) -> Counts:
        """The counts since then."""
        grown = {source: value - earlier.tokens[source] for source, value in self.tokens.items()}
        return Counts(grown, self.first_token_s - earlier.first_token_s, self.cpu_s - earlier.cpu_s)


class Engine(HttpChild):
    """One `vllm serve` with one thread."""

    def __init__(self, python: str, model: Path, log: Path, cache_bytes: int, room: int, socket: Path | None) -> None:
        """`cache_bytes`: memory of its own cache. `room`: tokens of the longest request. `socket`: of its daemon; None
        for an engine without the pool."""
        port = reserve_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
        environment |= ENVIRONMENT
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        # Otherwise vLLM sets the number of threads to that of the processors.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        options = ["--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"]
        options += ["--max-model-len", str(room), "--kv-cache-memory-bytes", str(cache_bytes), "--port", str(port)]
        options += ["--host", "127.0.0.1", "--enable-prefix-caching"]
        if socket is not None:
            settings = {"socket": socket, **SETTINGS}
            environment |= {f"TOKENLAKE_ENGINE_{name.upper()}": str(value) for name, value in settings.items()}
            options += ["--kv-transfer-config", CONNECTOR]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *options]
        super().__init__(command, port, log, environment, "/health")

    def counts(self) -> Counts:
        """The tokens and requests that the engine has served."""
        metrics = parse_metrics(self.page("/metrics"))
        return Counts(tokens_by_source(metrics), _first_token_s(metrics), self.cpu_s())


def tokens_by_source(metrics: Mapping[str, float]) -> dict[str, float]:
    """The prompt tokens on vLLM's metrics page: from its own cache, from the pool, and computed."""
    found = dict.fromkeys(SOURCES, 0.0)
    for series, value in metrics.items():
        if series.startswith("vllm:prompt_tokens_by_source_total{"):
            for name, label in SOURCES.items():
                if f'source="{label}"' in series:
                    found[name] += value
    return found


def _first_token_s(metrics: Mapping[str, float]) -> float:
    name = "vllm:time_to_first_token_seconds_sum"
    return sum(value for series, value in metrics.items() if series.startswith(name))
