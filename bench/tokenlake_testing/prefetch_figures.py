"""Measures what a prefetch before its request gives vLLM, in one run::

    .venv-vllm/bin/python -m tokenlake_testing.prefetch_figures

Two engines at two nodes take turns. One computes prompts; the other one gets them from that node, from its own, and
from its own because a request named them `LEAD_S` before."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

ROUNDS = 16
PROMPT = 3900
LEAD_S = 0.1
STORED_S = 0.3
"""Seconds after which the directory knows what an engine has stored."""
MODEL = TinyModel(vocabulary=512, hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=4, positions=8192)
"""A token takes 16 KiB in float32."""


def prompt(length: int, seed: int) -> list[int]:
    """Seeded token ids; two seeds share no prefix."""
    draw = random.Random(seed)
    return [draw.randrange(MODEL.vocabulary) for _ in range(length)]


def main() -> None:
    """Print the figures as JSON: milliseconds to the first token, medians and all rounds."""
    patient = {"match_deadline_ms": "20000", "suspect_ms": "20000"}
    with tempfile.TemporaryDirectory() as place, Cluster(2, "1536MiB", "32MiB", None, **patient) as cluster:
        model = save_tiny_model(Path(place, "model"), MODEL)
        writer, reader = (
            Engine(
                model,
                Path(place, f"{node.name}.log"),
                {"socket": str(node.socket), "match_ms": 1000, "weigh_loads": False},
                kv_cache_memory_bytes=128 << 20,
            )
            for node in cluster.nodes
        )
        times: dict[str, list[float]] = {"cold": [], "other node": [], "own node": [], "prefetched": []}

        def first_token(engine: Engine, name: str, tokens: list[int]) -> None:
            engine.call("flush")
            assert engine.call("forget")
            answer = engine.timed([tokens], 1)
            assert answer.cached == (0 if name == "cold" else PROMPT // 256 * 256), (name, answer.cached)
            times[name].append(answer.seconds * 1e3)

        for engine in (writer, reader):
            engine.generate([prompt(600, 1)], 1)
        for number in range(ROUNDS):
            told, asked = prompt(PROMPT, 1000 + number), prompt(PROMPT, 2000 + number)
            first_token(writer, "cold", asked)
            writer.generate([told], 1)
            writer.call("flush")
            time.sleep(STORED_S)
            first_token(reader, "other node", asked)
            first_token(reader, "own node", asked)
            reader.call("flush")
            assert reader.call("forget")
            action = {
                "action_id": "1",
                "action_type": "prefetch",
                "action_version": "1.0",
                "payload": {"token_ids": told},
            }
            reader.call("hinted", prompt=prompt(20, 3000 + number), tokens=1, actions=[action], salt=None)
            time.sleep(LEAD_S)
            answer = reader.timed([told], 1)
            times["prefetched"].append(answer.seconds * 1e3)
        print(
            json.dumps(
                {
                    "first token, ms": {name: round(statistics.median(each), 1) for name, each in times.items()},
                    "rounds": {name: [round(each_ms) for each_ms in each] for name, each in times.items()},
                    "tokens from other nodes": reader.call("counts")["tokens_hit_remote"],
                },
                indent=1,
            )
        )
        writer.close()
        reader.close()


if __name__ == "__main__":
    main()
