"""Hits of conversations on models with windows and recurrent states, behind vLLM's own offloading to host memory and in
the pool: `python -m tokenlake_bench.hybrid_turns`, with the Python of an environment that has vLLM.

Conversations of several turns take turns under one system prompt. vLLM's own cache is emptied before each request, as
if another instance served it, so that all hits come from the memory behind it, which has the same size in both
arrangements. Decisions are counted, not times: they do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tokenlake.config import format_size
from tokenlake_bench.engine.workload import prompt
from tokenlake_bench.report import table, write_json
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_hybrid, save_mistral, save_sliding_window
from tokenlake_testing.tiny_model import TinyModel

ANSWER = 24
SYSTEM = 900
NEW = 150
"""The tokens that a conversation's first turn adds; each later one adds 40 more."""
PATIENCE: Final = {"match_ms": 20000, "call_ms": 20000, "fetch_ms": 20000, "write_patience_s": 20}
VOCABULARY = 512
WIDE = TinyModel(vocabulary=VOCABULARY, hidden=256, intermediate=256, layers=4, heads=4, kv_heads=2)
NARROW = TinyModel(vocabulary=VOCABULARY, hidden=128, intermediate=256, layers=4, heads=4, kv_heads=2)
MEMORIES = (256 << 20, 32 << 20)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and vLLM's arguments."""

    name: str
    save: Callable[[str | Path, TinyModel | None], Path]
    sizes: TinyModel
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the pool's connector."""


LINEAR = {"dtype": "bfloat16"}
CASES = (
    Case("recurrent states", save_hybrid, WIDE, LINEAR),
    Case("recurrent states, prefix_match_unit 32", save_hybrid, WIDE, {**LINEAR, "prefix_match_unit": 32}),
    Case("windows and full attention", save_sliding_window, NARROW),
    Case("windows", save_mistral, NARROW),
    Case("windows, segment_tokens 128", save_mistral, NARROW, {}, {"segment_tokens": 128}),
    Case(
        "windows, prefix_cache_retention_interval 256", save_mistral, NARROW, {"prefix_cache_retention_interval": 256}
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The hits of one arrangement."""

    case: str
    arrangement: str
    memory: int
    prompt_tokens: int
    hit_tokens: int
    answers: list[list[int]]

    @property
    def share(self) -> float:
        """The share of the prompt tokens that were found."""
        return self.hit_tokens / self.prompt_tokens


def main() -> None:
    """Run all cases and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=6, help="conversations")
    parser.add_argument("--turns", type=int, default=5, help="turns of each")
    parser.add_argument("--case", default="", help="only the cases whose names contain this text")
    parser.add_argument("--json", type=Path, default=None, help="file for the result")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as name:
        for at, case in enumerate(case for case in CASES if options.case in case.name):
            directory = Path(name) / str(at)
            model = case.save(directory / "model", case.sizes)
            for memory in MEMORIES:
                for arrangement in ("vLLM's own offloading", "the pool"):
                    with _engine(model, directory / f"{memory} {arrangement}.log", arrangement, memory, case) as engine:
                        rows.append(_converse(engine, case.name, arrangement, memory, options.chats, options.turns))
    shown = [
        [row.case, format_size(row.memory), row.arrangement, f"{row.hit_tokens:,}", f"{row.share:.1%}"] for row in rows
    ]
    head = ("model", "memory", "behind vLLM", "tokens found", "of the prompts")
    Console(width=140).print(table("Conversations", head, shown))
    write_json([asdict(row) | {"share": row.share} for row in rows], options.json)


@contextmanager
def _engine(model: Path, log: Path, arrangement: str, memory: int, case: Case) -> Iterator[Engine]:
    arguments = {"kv_cache_memory_bytes": 128 << 20, "max_model_len": 4096, **case.arguments}
    if arrangement == "the pool":
        with Cluster(1, format_size(memory), "4MiB") as cluster:
            engine = Engine(
                model, log, {"socket": str(cluster.nodes[0].socket), **PATIENCE, **case.settings}, **arguments
            )
            try:
                yield engine
            finally:
                engine.close()
        return
    settings = {
        "cpu_bytes_to_use": memory,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "tokenlake_testing.native_offload",
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    engine = Engine(model, log, None, transfer=transfer, **arguments)
    try:
        yield engine
    finally:
        engine.close()


def _converse(engine: Engine, case: str, arrangement: str, memory: int, chats: int, turns: int) -> Row:
    said = [prompt(SYSTEM, 1, VOCABULARY) for _ in range(chats)]
    asked = found = 0
    answers = []
    for turn in range(turns):
        for chat in range(chats):
            said[chat] += prompt(NEW + 40 * turn, 100 * chat + turn + 2, VOCABULARY)
            answer = _ask(engine, said[chat])
            asked, found = asked + len(said[chat]), found + answer.cached
            answers.append(answer.tokens[0])
            said[chat] += answer.tokens[0]
    return Row(case, arrangement, memory, asked, found, answers)


def _ask(engine: Engine, tokens: Sequence[int]) -> Any:
    # vLLM offloads the end of a request in the next step, which another request makes.
    engine.generate([prompt(16, 7, VOCABULARY)], 2)
    engine.call("flush")
    assert engine.call("forget")
    return engine.timed([tokens], ANSWER)


if __name__ == "__main__":
    main()
