"""Damages stored segments, and finds tracebacks in the logs of engines that read them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tests.engines.vllm.conftest import DEADLINES
from tokenlake.layout import Layout
from tokenlake.opaque_layout import decode_layout
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

REGIONS = 64
"""A bound on the numbers of a node's regions."""


def tracebacks(engine: Engine) -> list[str]:
    """Lines of the engine's log that begin a traceback, without the one that vLLM itself logs where a tiny model has no
    chat template (`renderers/base.py`, warm-up)."""
    lines = engine.log.read_text().splitlines()
    return [line for line in lines if "Traceback" in line and "[base.py:" not in line]


def spoil(
    cluster: Cluster,
    engine: Engine,
    tokens: Sequence[int],
    segments: int | None = None,
    *,
    tail: bool = False,
    **identity: Any,
) -> int:
    """Overwrite the segments of a prompt in the memory of the engine's node, the last `segments` or all. `tail`: the
    last one is the tail of the prompt. `identity`: arguments of `Pool.prefix`, which are part of the keys. Returns the
    number of segments."""
    layout = Layout.decode(bytes.fromhex(engine.call("layout")))
    with Pool.connect(cluster.nodes[0].socket, layout, deadlines=DEADLINES) as pool, contextlib.ExitStack() as stack:
        chain = pool.prefix(tokens, **identity)
        full = len(chain.keys)
        end = [chain.tail_key(full, tokens[full * layout.segment_tokens :])] if tail else []
        lease = stack.enter_context(pool.match([*chain.keys, *end]))
        count = len(lease.fetch())
        first = 0 if segments is None else count - segments
        for region, slot, _ in lease.places[first:count].tolist():
            pool.link.regions.get(region, write=True).slots[slot] = 0
        return count - first


def spoil_all(cluster: Cluster, engine: Engine, node: int = 0) -> int:
    """Overwrite every segment of the engine's layout in the memory of a node. Returns the number of slots."""
    layout = decode_layout(bytes.fromhex(engine.call("layout")))
    count = 0
    with Pool.connect(cluster.nodes[node].socket, layout, deadlines=DEADLINES) as pool:
        for region in range(REGIONS):
            with contextlib.suppress(Exception):
                slots = pool.link.regions.get(region, write=True).slots
                if slots.shape[1] == layout.segment_bytes:
                    slots[:] = 0
                    count += len(slots)
    assert count
    return count
