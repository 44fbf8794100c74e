"""Three nodes with tenants, disks and locations, and engines that chat, search and work through documents."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.server.scene import private
from tokenlake.errors import TokenLakeError
from tokenlake.layout import Layout
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

NODES = ("gpu-a", "gpu-b", "gpu-c")
MEMORY = 256 << 20
TENANTS = {"chat": 0.7, "search": 0.5, "documents": 0.25, "trial": 0.05}
"""The tenants and their quotas, as shares of memory."""
LAYOUT = Layout(
    model_id="meta-llama/Llama-3.1-8B-Instruct",
    weights_digest="00",
    dtype="bfloat16",
    layers=8,
    kv_heads=4,
    key_dim=64,
    value_dim=64,
    position="rope",
    segment_tokens=64,
)
"""A segment takes 512 KiB."""
TOKENS_PER_S = 9000.0
"""The rate at which the engines compute prefills, as they tell the pool."""


@contextlib.contextmanager
def three_nodes(directory: Path) -> Iterator[Cluster]:
    """Three daemons, each with a disk tier and a location, and with the tenants above."""
    text = f'cluster_secret = "{"cc" * 32}"\n'
    for number, (name, quota) in enumerate(TENANTS.items()):
        secret = f"{number:02x}" * 32
        text += f'[[tenants]]\nname = "{name}"\nsecret = "{secret}"\ntokens = ["{token_of(name)}"]\nquota = {quota}\n'
    file = private(directory / "tokenlake.toml", text)
    with Cluster(0, str(MEMORY), "16MiB", config=file, match_deadline_ms="500") as cluster:
        for number, name in enumerate(NODES):
            cluster.add(name).settings["location"] = f"rack-{1 + number // 2}"
        for node in cluster.nodes:
            node.settings["peers"] = ",".join(f"{name}=127.0.0.1:{cluster.ports[name]}/{MEMORY}" for name in NODES)
        cluster.give_disks(nbytes=512 << 20)
        for node in cluster.nodes:
            node.start()
        cluster.wait_ready()
        yield cluster


def token_of(tenant: str) -> str:
    """The token of the tenant's engines."""
    return f"{tenant}-{'t' * 32}"


class Load:
    """Engines of all tenants at all nodes, in threads, until `close`. The load rises and falls within minutes."""

    def __init__(self, cluster: Cluster, requests_per_s: float = 6.0) -> None:
        self._ended = threading.Event()
        self._pause_s = len(cluster.nodes) * len(TENANTS) / requests_per_s
        self._threads = [
            threading.Thread(target=self._run, args=(node.socket, tenant, number * 10 + at), daemon=True)
            for number, node in enumerate(cluster.nodes)
            for at, tenant in enumerate(TENANTS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the engines."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, socket: Path, tenant: str, seed: int) -> None:
        draw = random.Random(seed)
        number = 0
        with Pool.connect(socket, LAYOUT, token_of(tenant)) as pool:
            while not self._ended.wait(self._pause_s * draw.uniform(0.3, 1.7) / busy(time.monotonic())):
                number += 1
                # A daemon that was killed, or that is late, costs an engine the request.
                with contextlib.suppress(TokenLakeError):
                    _serve(pool, tenant, draw, f"{REQUESTS[tenant]}-{seed:02d}{number:05d}")


REQUESTS = {"chat": "chatcmpl", "search": "search", "documents": "doc", "trial": "trial"}


def busy(now: float) -> float:
    """The load relative to its mean: a wave of 150 s."""
    return float(1.0 + 0.6 * np.sin(now * 2 * np.pi / 150))


def _serve(pool: Pool, tenant: str, draw: random.Random, name: str) -> None:
    """One request: read what is known, compute the rest, store it."""
    segments = prompt(tenant, draw)
    tokens = [token for seed in segments for token in _tokens(seed)]
    tail = draw.randrange(1, 64)
    keys = pool.prefix(tokens).keys
    options = MatchOptions(request=name, prompt_tokens=len(tokens) + tail)
    had = draw.choice([0, 0, 2, len(segments) // 2]) if tenant != "trial" else 0
    with pool.match(keys, options) as lease:
        hits = lease.hits
        start = min(had, hits)
        lease.takes(start * 64, hits * 64, (hits - start) * 64 / TOKENS_PER_S)
        read = lease.fetch(start, hits) if start < hits else []
        known = start + len(read)
    if known < len(keys):
        pool.store_all(keys[known:], _fill, known, patience=0.2, request=name)


def prompt(tenant: str, draw: random.Random) -> list[int]:
    """The seeds of a prompt's segments: a system prompt that is shared, and a conversation or a document."""
    if tenant == "chat":
        conversation = min(int(draw.paretovariate(1.1)), 60)
        return [*range(100, 108), *(10_000 + conversation * 100 + at for at in range(draw.randrange(2, 14)))]
    if tenant == "search":
        return [*range(200, 204), *(50_000 + draw.randrange(40) * 100 + at for at in range(6))]
    if tenant == "documents":
        document = draw.randrange(30)
        return [300_000 + document * 100 + at for at in range(24)]
    return [400_000 + draw.randrange(1 << 20) + at for at in range(8)]


def _tokens(seed: int) -> list[int]:
    return [(seed * 64 + at) % 128_000 for at in range(64)]


def _fill(index: int, slot: NDArray[np.uint8]) -> None:
    slot[:] = index & 0xFF
