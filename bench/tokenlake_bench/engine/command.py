"""`tokenlake bench engine`: times to the first token of one engine with and without the pool, and of two engines behind
a round-robin router."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from rich.console import Group
from rich.table import Table

from tokenlake.config import format_size
from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine.environment import check_interpreter
from tokenlake_bench.engine.workload import Conversations, prompt
from tokenlake_bench.report import output, table, write_json
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.lmcache_server import LMCacheServer, check_lmcache
from tokenlake_testing.tiny_model import save_tiny_model

HOOK_TOKENS = 32768
PATIENCE: Final = {"write_patience_s": 10.0, "match_ms": 1000.0}
"""Settings of the connector with which other programs on the machine cause no misses."""
ANSWER_TOKENS: Final = 16
ARRANGEMENTS = ("none", "native", "lmcache")
VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Path of the Python interpreter in the environment that `make install-vllm` creates."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments of the command `bench engine`; the command's options describe them."""

    engine: str = "vllm"
    against: str = "none,native"
    model: Path | None = None
    python: Path | None = None
    lengths: str = "1024,4096,16384"
    repeats: int = 3
    memory_mib: int = 64
    json_file: Path | None = None


def run_engine(arguments: EngineArguments) -> dict[str, Any]:
    """Run the benchmark, print its tables and return the result; docs/results/engine.md describes the result's keys."""
    against = [name for name in arguments.against.split(",") if name]
    for name in against:
        if name not in ARRANGEMENTS:
            raise ConfigurationError("against", name, f"names among {', '.join(ARRANGEMENTS)}")
    if arguments.engine == "transformers" and (left_out := {"native", "lmcache"} & set(against)):
        print(f"transformers has no prefix cache of its own and no connectors: {sorted(left_out)} left out")
        against = [name for name in against if name not in left_out]
    if "lmcache" in against:
        check_lmcache()
    lengths = [int(word) for word in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as directory:
        bench = _Bench(arguments, Path(directory), max(lengths))
        single, hook_ms = bench.single(lengths)
        rows = single + bench.pairs(against)
    result = {
        "engine": arguments.engine,
        "tokens_equal": all(row["tokens_equal"] for row in rows),
        "ttft_cold_ms": single[-1]["ttft_cold_ms"],
        "ttft_pool_ms": single[-1]["ttft_pool_ms"],
        "connector_ms": single[-1]["connector_ms"],
        "hook_32k_ms": hook_ms,
        "rows": rows,
    }
    output().print(_tables(result))
    write_json(result, arguments.json_file)
    return result


class _Bench:
    """One run of `bench engine`: its model and settings, and the starts of its engines and daemons."""

    def __init__(self, arguments: EngineArguments, directory: Path, longest: int) -> None:
        self._arguments = arguments
        self._directory = directory
        self._python = str(arguments.python or _python_of(arguments.engine))
        check_interpreter(self._python, arguments.engine)
        self._model = arguments.model or save_tiny_model(directory / "model")
        self._room = longest + 1024

    @contextmanager
    def engine(
        self,
        name: str,
        pool: dict[str, Any] | None,
        memory_mib: int,
        *,
        native: bool,
        room: int = 4096,
        peer: LMCacheServer | None = None,
    ) -> Iterator[Engine]:
        """Context in which an engine process runs. `native`: vLLM's own prefix cache is on. `room`: tokens of the
        longest request that the engine must take. `peer`: the server to which the engine connects in place of a
        pool."""
        options: dict[str, Any] = {}
        if self._arguments.engine == "vllm":
            options = {
                "kv_cache_memory_bytes": memory_mib << 20,
                "max_model_len": room,
                "enable_prefix_caching": native,
            }
        if peer is not None:
            options |= {"transfer": peer.transfer, "environment": peer.environment}
        log = self._directory / f"{name}.log"
        engine = Engine(self._model, log, pool, kind=self._arguments.engine, python=self._python, **options)
        try:
            yield engine
        finally:
            engine.close()

    def single(self, lengths: Sequence[int]) -> tuple[list[dict[str, Any]], float | None]:
        """Measure the time to the first token by prompt length: without the pool, with an empty pool, and with a pool
        that has the prompt. Returns a row per length, and the milliseconds that the connector's calls in vLLM's
        scheduler take for a long prompt."""
        memory = max(self._arguments.memory_mib, 128)
        rows = []
        with Cluster(1, "1GiB", "64MiB") as cluster, ExitStack() as engines:
            pool = {"socket": str(cluster.nodes[0].socket), **PATIENCE}
            plain = engines.enter_context(self.engine("plain", None, memory, native=False, room=self._room))
            pooled = engines.enter_context(self.engine("pooled", pool, memory, native=True, room=self._room))
            for engine in (plain, pooled):
                engine.generate([prompt(300, 99)], 2)
            for length in lengths:
                prompts = [prompt(length, length + number) for number in range(self._arguments.repeats)]
                rows.append(_by_length(length, prompts, plain, pooled))
            hook_ms = pooled.call("hook_ms", tokens=HOOK_TOKENS)
        return rows, hook_ms

    def pairs(self, against: Sequence[str]) -> list[dict[str, Any]]:
        """Measure two engines behind a round-robin router, with the pool and in each arrangement of `against`; returns
        a row per arrangement. All arrangements have the same memory in all: the pool's share, and that of LMCache's
        server, is taken from the engines' memory. The arrangements serve each request in turn, so that other programs
        on the machine slow all of them alike."""
        workload = Conversations()
        with ExitStack() as stack:
            pairs = [_Pair(name, stack.enter_context(self._two(name)), workload) for name in (*against, "pool")]
            for turn in range(workload.turns):
                for number, question in enumerate(workload.questions(turn)):
                    for at in range(len(pairs)):
                        pairs[(at + number) % len(pairs)].serve(turn, number, question)
            return [pair.row() | {"tokens_equal": pair.answers == pairs[0].answers} for pair in pairs]

    @contextmanager
    def _two(self, name: str) -> Iterator[tuple[Engine, Engine]]:
        """Context in which the two engines of an arrangement run, and the processes to which they connect."""
        memory = self._arguments.memory_mib
        pool: dict[str, Any] | None = None
        peer: LMCacheServer | None = None
        shares = name in ("pool", "lmcache")
        with ExitStack() as stack:
            if name == "pool":
                cluster = stack.enter_context(Cluster(1, format_size(memory << 20), "16MiB"))
                pool = {"socket": str(cluster.nodes[0].socket), **PATIENCE}
            elif name == "lmcache":
                peer = stack.enter_context(LMCacheServer(self._python, memory))
            first, second = (
                stack.enter_context(
                    self.engine(
                        f"{name}-{number}",
                        pool,
                        memory // 2 if shares else memory,
                        native=name != "none",
                        peer=peer,
                    )
                )
                for number in range(2)
            )
            for engine in (first, second):
                engine.generate([prompt(300, 99)], 2)
            if peer is not None:
                peer.hide_memory()
            yield first, second


def _by_length(length: int, prompts: Sequence[list[int]], plain: Engine, pooled: Engine) -> dict[str, Any]:
    none = [plain.timed([tokens], 1) for tokens in prompts]
    cold = [pooled.timed([tokens], 1) for tokens in prompts]
    pooled.call("flush")
    pooled.call("forget")
    before = pooled.call("counts")
    warm = [pooled.timed([tokens], 1) for tokens in prompts]
    after = pooled.call("counts")
    spent = after["hook_seconds"] - before["hook_seconds"]
    return {
        "part": "one instance",
        "prompt_tokens": length,
        "ttft_none_ms": 1e3 * mean(run.seconds for run in none),
        "ttft_cold_ms": 1e3 * mean(run.seconds for run in cold),
        "ttft_pool_ms": 1e3 * mean(run.seconds for run in warm),
        "connector_ms": 1e3 * spent / len(prompts),
        "hit_tokens": (after["tokens_hit"] - before["tokens_hit"]) / len(prompts),
        "tokens_equal": [run.tokens for run in none] == [run.tokens for run in cold] == [run.tokens for run in warm],
    }


def _python_of(engine: str) -> Path:
    if engine == "vllm" and VLLM_PYTHON.exists():
        return VLLM_PYTHON.absolute()
    return Path(sys.executable)


def _tables(result: dict[str, Any]) -> Group:
    """The tables of the result: by length of the prompt, and by arrangement of two instances."""
    single = [row for row in result["rows"] if "ttft_none_ms" in row]
    pairs = [row for row in result["rows"] if "arrangement" in row]
    times = {"ttft_none_ms": "without", "ttft_cold_ms": "cold", "ttft_pool_ms": "from pool"}
    tokens = {"hit_tokens": "from pool", "tokens_equal": "equal"}
    hook = f"scheduler hook for a new prompt of 32K tokens: {_text(result['hook_32k_ms'])} ms"
    return Group(
        _table(
            f"{result['engine']}, one instance: ms to the first token; tokens",
            single,
            {"prompt_tokens": "prompt", **times, "connector_ms": "connector", **tokens},
            hook,
        ),
        _table(
            "two instances, round robin: ms to the first token, of all and of warm requests",
            pairs,
            {"arrangement": "", "ttft_ms": "all", "ttft_warm_ms": "warm", "answers_per_second": "answers/s"}
            | {"connector_ms": "connector", "tokens_equal": "equal"},
        ),
    )


def _table(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, str], caption: str | None = None) -> Table:
    cells = [[_text(row.get(name)) for name in columns] for row in rows]
    return table(title, list(columns.values()), cells, caption)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "-" if value is None else str(value)


class _Pair:
    """Two engines of one arrangement, which serve the requests of conversations alternately."""

    def __init__(self, name: str, engines: Sequence[Engine], workload: Conversations) -> None:
        self._name = name
        self._engines = engines
        self._before = self._hook_seconds()
        self._histories: list[list[int]] = [[] for _ in range(workload.conversations)]
        self._first: list[float] = []
        self._later: list[float] = []
        self._whole: list[float] = []
        self._prompt_tokens = 0
        self.answers: list[list[int]] = []
        """The tokens of all answers so far."""

    def serve(self, turn: int, number: int, question: list[int]) -> None:
        """Serve the next request of a conversation."""
        history = self._histories[number]
        history += question
        # The router shifts by one engine with each request of the conversation, so that its requests alternate between
        # the two engines.
        engine = self._engines[(len(self.answers) + turn % 2) % len(self._engines)]
        self._first.append(engine.timed([history], 1).seconds)
        if turn > 0:
            self._later.append(self._first[-1])
        run = engine.timed([history], ANSWER_TOKENS)
        self._whole.append(run.seconds)
        self._prompt_tokens += len(history)
        history += run.tokens[0]
        self.answers.append(run.tokens[0])

    def row(self) -> dict[str, Any]:
        """The row of the JSON, for the requests served so far. The warm requests are all but the first of each
        conversation."""
        served = len(self.answers)
        return {
            "part": "two instances, round robin",
            "arrangement": self._name,
            "prompt_tokens": self._prompt_tokens,
            "ttft_ms": 1e3 * mean(self._first),
            "ttft_warm_ms": 1e3 * mean(self._later),
            "answers_per_second": served / (sum(self._first) + sum(self._whole)),
            "connector_ms": 1e3 * (self._hook_seconds() - self._before) / (2 * served),
        }

    def _hook_seconds(self) -> float:
        """Seconds in the hooks of TokenLake's connector; 0 in other arrangements."""
        counts: list[dict[str, float]] = [engine.call("counts") for engine in self._engines]
        return sum(count.get("hook_seconds", 0.0) for count in counts)
