"""The families of `tokenlake bench engine --families`: for each a small model, and vLLM without the pool, with an empty
pool, and, in another process, with a pool that has the prompts.

A control stores segments of zeros, whose checksums fit, and lets the second process read them: the tokens must change,
or the process has not used the bytes of the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.engine.workload import prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import FAMILIES, Family, save_adapter

PROMPT_TOKENS: Final = 4096 + 128
"""Behind its last whole segment a prompt has, on average, half a segment."""
NEW_TOKENS: Final = 16
HOOK_TOKENS: Final = 32768
MEMORY_BYTES: Final = 256 << 20
PATIENCE: Final = {"write_patience_s": 10.0, "match_ms": 1000.0}
"""Settings of the connector with which other programs on the machine cause no misses."""
STORED_S: Final = 30.0
QUIET_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FamilyBench:
    """Arguments of a family's measurement. `python`: an interpreter with vLLM."""

    directory: Path
    python: str
    prompt_tokens: int = PROMPT_TOKENS
    repeats: int = 2


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answers of an engine to some prompts: time to the first token, tokens, and the mean number of prompt tokens
    that the engine did not compute."""

    ttft_ms: float
    tokens: list[list[int]]
    hit_tokens: float


def families_of(text: str) -> list[str]:
    """The families that the option `--families` names: names separated by commas, or "all". Raises ConfigurationError
    for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise ConfigurationError("families", name, f"'all', or names among {', '.join(FAMILIES)}")
    return list(dict.fromkeys(names))


def run_family(name: str, bench: FamilyBench) -> dict[str, Any]:
    """Measure one family. Returns its part of the JSON, which docs/results/engine.md describes. An engine that ends is
    the family's result: "skipped" where it is vLLM without the pool, else "failed"."""
    try:
        return _measure(name, bench)
    except Unreachable as error:
        return {"failed": reason_of(str(error))}


def _measure(name: str, bench: FamilyBench) -> dict[str, Any]:
    family = FAMILIES[name]
    family.save(bench.directory / name, family.model)
    adapter = save_adapter(bench.directory / f"{name}-adapter", family.model) if family.adapter else None
    requests = _Requests(bench, adapter)
    prompts = [prompt(bench.prompt_tokens, f"{name} {number}") for number in range(bench.repeats)]
    controls = [prompt(bench.prompt_tokens, f"{name} control {number}") for number in range(bench.repeats)]
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(1, "1GiB", "64MiB"))
        pool = {"socket": str(cluster.nodes[0].socket), **PATIENCE, **family.settings}

        def start(role: str, settings: dict[str, Any] | None) -> Engine:
            engine = _engine(bench, family, bench.directory / name, f"{name}-{role}", settings)
            stack.callback(engine.close)
            requests.warm_up(engine)
            return engine

        try:
            plain = start("plain", None)
            none = requests.answers(plain, prompts)
            right = requests.answers(plain, controls)
        except Unreachable as error:
            return {"skipped": reason_of(str(error))}
        plain.close()
        writer = start("writer", pool)
        cold = requests.answers(writer, prompts)
        _wait_stored(cluster, lambda: requests.nudge(writer))
        writer.call("spoil_writes")
        requests.answers(writer, controls)
        _wait_stored(cluster, lambda: requests.nudge(writer))
        writer.close()
        reader = start("reader", pool)
        warm = requests.answers(reader, prompts)
        wrong = requests.answers(reader, controls)
        return {
            "door": reader.call("door"),
            "tokens_equal": none.tokens == cold.tokens == warm.tokens,
            "control_changed": wrong.tokens != right.tokens,
            "ttft_none_ms": none.ttft_ms,
            "ttft_cold_ms": cold.ttft_ms,
            "ttft_pool_ms": warm.ttft_ms,
            "hit_tokens": warm.hit_tokens,
            "hook_32k_ms": reader.call("hook_ms", tokens=HOOK_TOKENS),
        }


def reason_of(error: str) -> str:
    """The reason in the output of an engine that ended: its last line that names an error."""
    lines = [line.strip() for line in error.splitlines() if "Error: " in line or line.rstrip().endswith("Error")]
    return lines[-1].removeprefix("[rank0]:").strip() if lines else error.strip()[-200:]


class _Requests:
    """Sends the requests of a family to engines."""

    def __init__(self, bench: FamilyBench, adapter: Path | None) -> None:
        self._bench = bench
        self._adapter = adapter
        self._nudges = 0

    def warm_up(self, engine: Engine) -> None:
        """The first requests of an engine, which take longer than later ones."""
        for number in range(2):
            engine.generate([prompt(300, f"warm up {number}")], 2, adapter=self._adapter)

    def nudge(self, engine: Engine) -> None:
        """A short request: vLLM hands the last blocks of a request to its connector in a later step."""
        self._nudges += 1
        engine.generate([prompt(40, f"nudge {self._nudges}")], 3, adapter=self._adapter)

    def answers(self, engine: Engine, prompts: Sequence[list[int]]) -> _Answer:
        """The answers to prompts that are not in the engine's own cache."""
        engine.call("forget")
        first = [engine.timed([tokens], 1, adapter=self._adapter) for tokens in prompts]
        whole = [engine.generate([tokens], NEW_TOKENS, adapter=self._adapter)[0] for tokens in prompts]
        return _Answer(1e3 * mean(one.seconds for one in first), whole, mean(one.cached for one in first))


def _engine(bench: FamilyBench, family: Family, model: Path, log_name: str, settings: dict[str, Any] | None) -> Engine:
    arguments = {
        "kv_cache_memory_bytes": MEMORY_BYTES,
        "max_model_len": bench.prompt_tokens + 1024,
        **family.arguments,
    }
    return Engine(model, bench.directory / f"{log_name}.log", settings, python=bench.python, **arguments)


def _wait_stored(cluster: Cluster, nudge: Callable[[], None]) -> None:
    """Wait until the daemon has stored nothing new for a while."""
    nudge()
    until = time.monotonic() + STORED_S
    stored, since = -1.0, time.monotonic()
    while time.monotonic() < until:
        now = cluster.nodes[0].metrics().get("tokenlake_stored_segments_total", 0.0)
        if now != stored:
            stored, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET_S:
            return
        time.sleep(0.1)
