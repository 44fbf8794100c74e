"""The time that storing segments adds to vLLM's steps: `python -m tokenlake_bench.engine_saving`.

Three arrangements compute prompts of the same lengths in turn: an engine without the connector, one whose connector
stores nothing, and the same process storing every segment (two processes of the same engine differ by several percent).
Prompts are computed in steps of `STEP_TOKENS`, so that a step runs while the previous step's segments are copied out.
The last step's segments are stored before the next turn.

With `--families` this is done for a small model of each family (as `tokenlake bench engine --families`).

A step is identified by its position in the turn; the lower quartile of its times over all rounds estimates its time on
a machine without other programs. `cpu` is processor time of the computing thread, which does not count other programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, mode, quantiles
from typing import Any

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_families import families_of
from tokenlake_bench.engine_workload import prompt
from tokenlake_bench.environment import check_interpreter
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine, Timed
from tokenlake_testing.families import FAMILIES, save_adapter

NAMES = ("no connector", "storing nothing", "storing all")
SEGMENT_TOKENS = 256
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Load:
    """A set of requests that an engine gets at once and whose steps are timed."""

    name: str
    prompts: int
    prompt_tokens: int
    new_tokens: int


LOADS = (Load("prefill", 1, 4096, 1), Load("prefill and decode", 4, 1024, 64))


def main() -> int:
    """The main function. Returns the exit status: 0 when all engines gave the same tokens and the one that stores every
    segment did so, 1 when not, 2 without vLLM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter with vLLM")
    parser.add_argument("--rounds", type=int, default=20, help="repetitions of each engine and load")
    parser.add_argument("--families", default="llama", help="'all', or names separated by commas")
    parser.add_argument("--loads", default=",".join(load.name for load in LOADS), help="names separated by commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    python = str(Path(arguments.python).absolute())
    try:
        check_interpreter(python, "vllm")
        families = families_of(arguments.families)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    loads = [load for load in LOADS if load.name in arguments.loads.split(",")]
    rows = []
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as directory:
        for family in families:
            with ExitStack() as stack:
                engines = _Engines(family, Path(directory), python, stack)
                for load in loads:
                    row = _measure(engines, load, arguments.rounds)
                    print(json.dumps(row, indent=2), flush=True)
                    rows.append(row)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0 if all(row["tokens_equal"] and row["stored_all"] for row in rows) else 1


class _Engines:
    """The processes of one family."""

    def __init__(self, family: str, directory: Path, python: str, stack: ExitStack) -> None:
        """The processes end with `stack`."""
        self.family = family
        kind = FAMILIES[family]
        model = kind.save(directory / family, kind.model)
        self._adapter = save_adapter(directory / f"{family}-adapter", kind.model) if kind.adapter else None
        cluster = stack.enter_context(Cluster(1, "2GiB", "64MiB"))
        pool = {"socket": str(cluster.nodes[0].socket), "write_patience_s": 10.0}
        engines = []
        for name, settings in (("plain", None), ("pooled", pool)):
            arguments = {
                "kv_cache_memory_bytes": 256 << 20,
                "max_model_len": 8192,
                "max_num_batched_tokens": STEP_TOKENS,
                **kind.arguments,
            }
            engine = Engine(model, directory / f"{family}-{name}.log", settings, python=python, **arguments)
            stack.callback(engine.close)
            self.run(engine, [prompt(2 * STEP_TOKENS, 1)], 2)
            engines.append(engine)
        self.storing = engines[1]
        self.by_name: Mapping[str, Engine] = dict(zip(NAMES, (engines[0], engines[1], engines[1]), strict=True))
        self.door = self.storing.call("door")

    def run(self, engine: Engine, prompts: Sequence[list[int]], tokens: int) -> Timed:
        """Generate tokens, and wait until the segments are stored."""
        run = engine.timed(prompts, tokens, adapter=self._adapter)
        engine.call("flush")
        return run


def _measure(engines: _Engines, load: Load, rounds: int) -> dict[str, Any]:
    """Time one set of requests on each of the three engine arrangements `rounds` times. Returns its row of the JSON;
    times are milliseconds of the whole set."""
    turns: dict[str, list[float]] = {name: [] for name in NAMES}
    clocks: dict[str, list[dict[str, list[float]]]] = {name: [] for name in NAMES}
    storing = engines.storing
    answers: dict[str, list[Any]] = {name: [] for name in NAMES}
    before = storing.call("counts")
    for engine in engines.by_name.values():
        engine.call("clocks")
    for number in range(rounds):
        for name in (*NAMES[number % 3 :], *NAMES[: number % 3]):
            engine, seed = engines.by_name[name], "stored" if name != "storing nothing" else "not stored"
            prompts = [prompt(load.prompt_tokens, f"{load.name} {number} {at} {seed}") for at in range(load.prompts)]
            if engine is storing:
                engine.call("save", on=name == "storing all")
            run = engines.run(engine, prompts, load.new_tokens)
            clocks[name].append(engine.call("clocks"))
            turns[name].append(1e3 * run.seconds)
            answers[name].append(run.tokens)
    after = storing.call("counts")
    # Requests that wait for the pool's reply may be batched in more forward passes. Only the repetitions with the most
    # common number of passes are compared.
    count = mode(len(clock["step_fn"]) for name in NAMES for clock in clocks[name])
    steps, own = (
        {name: _undisturbed([clock[key] for clock in clocks[name]], count) for name in NAMES}
        for key in ("step_fn", "step_fn cpu")
    )
    # The last generated token is subtracted, because its keys and values are never computed.
    segments = (load.prompt_tokens + load.new_tokens - 1) // SEGMENT_TOKENS * load.prompts * rounds
    stored = after["tokens_stored"] - before["tokens_stored"]
    return {
        "family": engines.family,
        "door": engines.door,
        "load": load.name,
        "prompts": load.prompts,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "steps": count,
        "turn_median_ms": {name: median(times) for name, times in turns.items()},
        "steps_ms": steps,
        "steps_cpu_ms": own,
        "delay": steps["storing all"] / steps["storing nothing"] - 1,
        "delay_to_no_connector": steps["storing all"] / steps["no connector"] - 1,
        "delay_cpu": own["storing all"] / own["storing nothing"] - 1,
        "hooks_ms": {
            hook: 1e3 * median(sum(clock[hook]) for clock in clocks["storing all"])
            for hook in ("save_kv_layer", "wait_for_save")
        },
        "writer_ms": 1e3 * (after["save_seconds"] - before["save_seconds"]) / rounds,
        "stored_share": stored / (SEGMENT_TOKENS * segments),
        # Behind vLLM's OffloadingConnector, segments have other lengths, and vLLM leaves some of them out.
        "stored_all": stored == SEGMENT_TOKENS * segments if engines.door == "connector" else stored > 0,
        "tokens_equal": answers["storing all"] == answers["no connector"],
    }


def _undisturbed(rounds: Sequence[Sequence[float]], steps: int) -> float:
    """Estimated milliseconds of one set of requests: the sum over its forward passes of the lower quartile of each
    pass's time, over the repetitions that have `steps` passes."""
    alike = [times for times in rounds if len(times) == steps]
    return 1e3 * sum(float(quantiles(times, n=4)[0]) for times in zip(*alike, strict=True))


if __name__ == "__main__":
    sys.exit(main())
