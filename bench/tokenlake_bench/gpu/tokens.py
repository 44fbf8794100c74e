"""A model under vLLM with and without the pool, for each of the two connectors: greedy tokens, the time to the first
token, and many requests at once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine.environment import check_interpreter
from tokenlake_bench.engine.workload import prompt
from tokenlake_bench.gpu.base import CPU, NotRun, Rig, Row, device_named
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
"""Speculation, with which vLLM's cache is opaque."""


LENGTHS = (300, 1024, 4000)
LONG = 6000
"""Tokens of the prompt whose time to the first token is measured."""
WAITING = 200
"""Requests that are given to the engine at once; each has tokens of its own behind one of the prompts of `LENGTHS`."""


def vllm(rig: Rig) -> Iterator[Row]:
    """Two rows for each connector: whether a cold and a warm run gave the tokens of an engine without the pool, the
    prompt tokens that came from the pool, and milliseconds to the first token of a long prompt; many requests at
    once, all of which are answered."""
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
            yield from _rows(rig.model, str(cluster.nodes[0].socket), arguments)


def _rows(model: Path, socket: str, arguments: dict[str, Any]) -> Iterator[Row]:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_cache_memory_bytes": 4 << 30}
    options |= arguments
    prompts = [prompt(length, length) for length in LENGTHS]
    many = [prompts[number % len(prompts)] + prompt(40, number) for number in range(WAITING)]
    with tempfile.TemporaryDirectory() as directory:
        plain = Engine(model, Path(directory, "plain.log"), **options)
        expected = plain.generate(prompts)
        plain.call("forget")
        all_expected = plain.timed(many)
        plain.close()
        pooled = Engine(model, Path(directory, "pooled.log"), {"socket": socket}, **options)
        cold, long = pooled.generate(prompts), prompt(LONG, LONG)
        first = pooled.timed([long], 1)
        # vLLM's own connector hands the last blocks of a request to its backend in a later step.
        pooled.generate([prompt(40, 40)])
        pooled.call("flush")
        pooled.call("forget")
        warm = pooled.generate(prompts)
        hits = pooled.call("counts")["tokens_hit"]
        name = pooled.call("door") + (", n-gram speculation" if arguments else "")
        second = pooled.timed([long], 1)
        right = cold == warm == expected and first.tokens == second.tokens and hits > 0
        times = {"cold_ms": 1e3 * first.seconds, "warm_ms": 1e3 * second.seconds}
        yield Row(name, right, {"tokens_hit": float(hits), **times})
        pooled.call("forget")
        answers = pooled.timed(many)
        pooled.close()
    figures = {"s": answers.seconds, "without_the_pool_s": all_expected.seconds}
    # The sums of a step with many requests are taken in another order: some greedy tokens differ in bfloat16, with the
    # pool and without.
    same = sum(own == other for own, other in zip(answers.tokens, all_expected.tokens, strict=True))
    whole = [len(each) for each in answers.tokens] == [len(each) for each in all_expected.tokens]
    yield Row(f"{name}, {WAITING} requests at once", whole, {**figures, "answers_equal": float(same)})
