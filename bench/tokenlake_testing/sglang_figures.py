"""Measures SGLang with the pool, with its own `file` backend, and without a tier behind its host memory, in one run::

    PYTHONPATH=tests/engines/sglang/standins .venv-sglang/bin/python -m tokenlake_testing.sglang_figures

The engines of one model run beside each other, and take turns: each figure is the median of its rounds. SGLang's own
cache is emptied before each measurement, so that prefixes come from the tier behind it or are computed. Where the
package `mooncake` can be imported, SGLang's backend for it is measured too: over TCP, with 1 GiB of the engine's
process as its memory, the way in which SGLang's documentation sets it up."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.ports import free_port
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

ROUNDS = 3
PROMPT, SHARED, OWN, PREFIXES, REQUESTS = 4096, 2048, 128, 4, 16
PAGE_KEYS = {"prefetch_threshold": 64}
SETTLE_S = 8.0
"""Seconds after which SGLang has stored what it computed."""


def prompt(length: int, seed: int) -> list[int]:
    """Seeded token ids; two seeds share no prefix."""
    state, tokens = seed * 7919 + 1, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2147483648
        tokens.append((state >> 12) % 1024)
    return tokens


def forget(engine: Engine) -> None:
    """Empty SGLang's own cache; it refuses while a request ends."""
    while not engine.call("forget"):
        time.sleep(0.05)


def mooncake(started: list[subprocess.Popen[bytes]]) -> dict[str, Any] | None:
    """The settings of SGLang's backend for Mooncake, whose master is started and added to `started`; None without the
    package."""
    package = importlib.util.find_spec("mooncake")
    if package is None or package.submodule_search_locations is None:
        return None
    port = free_port()
    master = Path(package.submodule_search_locations[0], "mooncake_master")
    master.chmod(0o755)
    arguments = [str(master), "-rpc_address=127.0.0.1", f"-rpc_port={port}", f"-metrics_port={free_port()}"]
    started.append(subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return {
        "backend": "mooncake",
        "master_server_address": f"127.0.0.1:{port}",
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": "1gb",
        **PAGE_KEYS,
    }


def main() -> None:
    """Print the figures as JSON."""
    with tempfile.TemporaryDirectory() as place, Cluster(1, "2GiB", "16MiB") as cluster:
        model = save_tiny_model(Path(place, "model"), TinyModel())
        pool = {
            "backend_name": "tokenlake",
            "module_path": "tokenlake_client.engines.sglang",
            "class_name": "TokenLakeStorage",
            "interface_v1": 1,
            "socket": str(cluster.nodes[0].socket),
            "match_ms": 1000,
            **PAGE_KEYS,
        }
        tiers: dict[str, dict[str, Any] | None] = {"none": None, "pool": pool, "file": {"backend": "file", **PAGE_KEYS}}
        started: list[subprocess.Popen[bytes]] = []
        peer = mooncake(started)
        if peer is None:
            print("the package `mooncake` is not installed: its backend is not measured", file=sys.stderr)
        else:
            tiers["mooncake"] = peer
        environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment["TOKENLAKE_SGLANG_NEW_ROWS"] = "1"
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(Path(place, "files"))
        engines = {
            name: Engine(
                model,
                Path(os.environ.get("LOGS", place), f"{name}.log"),
                tier,
                kind="sglang",
                environment=environment,
                max_total_tokens=65536,
                log_level="warning",
            )
            for name, tier in tiers.items()
        }
        print(json.dumps(measured(engines), indent=1))
        for engine in engines.values():
            engine.close()
        for process in started:
            process.kill()
            process.wait()


def measured(engines: dict[str, Engine]) -> dict[str, Any]:
    """Seconds to the first token of a prompt, and tokens per second of requests that share prefixes, by engine."""
    long = prompt(PROMPT, 1)
    many = [prompt(SHARED, 10 + at % PREFIXES) + prompt(OWN, 100 + at) for at in range(REQUESTS)]
    expected = engines["none"].generate([long, *many], 1)
    for name, engine in engines.items():
        assert engine.generate([long, *many], 1) == expected, name
    time.sleep(SETTLE_S)
    for name, engine in engines.items():
        forget(engine)
        print(name, "cached tokens of the long prompt:", engine.timed([long], 1).cached, file=sys.stderr)
    first: dict[str, list[float]] = {name: [] for name in engines}
    rate: dict[str, list[float]] = {name: [] for name in [*engines, "own cache"]}
    cached: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            forget(engine)
            first[name].append(engine.timed([long], 1).seconds)
            forget(engine)
            answer = engine.timed(many, 1)
            assert answer.tokens == expected[1:], name
            rate[name].append(sum(map(len, many)) / answer.seconds)
            cached[name] = answer.cached
        # Nothing is forgotten before this one: what a tier that takes no time would give.
        rate["own cache"].append(sum(map(len, many)) / engines["none"].timed(many, 1).seconds)
    return {
        "first token, s": {name: round(statistics.median(each), 4) for name, each in first.items()},
        "prompt tokens per s": {name: round(statistics.median(each)) for name, each in rate.items()},
        "cached tokens": cached,
        "rounds": {"first token, s": first, "prompt tokens per s": rate},
    }


if __name__ == "__main__":
    main()
