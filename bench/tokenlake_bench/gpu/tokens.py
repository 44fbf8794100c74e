"""Greedy tokens of a model under vLLM with and without the pool, for each of the two connectors."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_workload import prompt
from tokenlake_bench.environment import check_interpreter
from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row, device_named
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

__all__ = ["tokens"]

GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
"""Speculation, with which vLLM's cache is opaque."""


def tokens(rig: Rig) -> Iterator[Row]:
    """A row for each connector: whether a cold and a warm run gave the tokens of an engine without the pool, and how
    many prompt tokens came from the pool."""
    if rig.device == CPU:
        raise NotRun("no CUDA device")
    device_named(rig.device)
    if rig.model is None:
        raise NotRun("no model: --model")
    try:
        check_interpreter(sys.executable, "vllm")
    except ConfigurationError as error:
        raise NotRun(str(error)) from error
    with Cluster(1, "3GiB", "256MiB") as cluster:
        for arguments in ({}, {"speculative_config": GUESSING}):
            yield _row(rig.model, str(cluster.nodes[0].socket), arguments)


def _row(model: Path, socket: str, arguments: dict[str, Any]) -> Row:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_cache_memory_bytes": 4 << 30}
    options |= arguments
    prompts = [prompt(length, length) for length in (300, 1024, 4000)]
    with tempfile.TemporaryDirectory() as directory:
        plain = Engine(model, Path(directory, "plain.log"), **options)
        expected = plain.generate(prompts)
        plain.close()
        pooled = Engine(model, Path(directory, "pooled.log"), {"socket": socket}, **options)
        cold = pooled.generate(prompts)
        # vLLM's own connector hands the last blocks of a request to its backend in a later step.
        pooled.generate([prompt(40, 40)])
        pooled.call("flush")
        pooled.call("forget")
        warm = pooled.generate(prompts)
        hits, door = pooled.call("counts")["tokens_hit"], pooled.call("door")
        pooled.close()
    return Row(str(door), cold == warm == expected and hits > 0, {"tokens_hit": float(hits)})
