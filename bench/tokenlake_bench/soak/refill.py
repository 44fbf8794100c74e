"""After the load: does every slot still take a segment?

Fresh segments are stored until nothing is left of what the engines stored: a slot that something holds forever would
keep its old segment. Each is read again and compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.cluster import Cluster
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.soak.load import GROUPS, PROMPTS, Group, fresh_prompt, prompt
from tokenlake_client import Pool

__all__ = ["Refilled", "refill"]

SEGMENTS: Final = 4
"""Of a fresh prompt."""
ROUNDS: Final = 8
"""Each as many segments as the group has slots; where they go is up to chance, so that one round is not enough."""
LIMIT_S: Final = 15.0
"""For one prompt. A write budget that is used up, or a region that changes hands, makes a store wait."""


@dataclass
class Refilled:
    """Counts of segments. `left`: of what engines stored, found after the last round."""

    asked: int = 0
    stored: int = 0
    wrong_bytes: int = 0
    left: int = 0
    stuck: str = ""
    """What became of the prompt that could not be stored and read back, if there was one."""


def refill(cluster: Cluster, seed: int) -> Refilled:
    """Of all groups, through every node. Raises TokenLakeError when a daemon does not answer."""
    result = Refilled()
    for group in GROUPS:
        with ExitStack() as stack:
            pools = [
                stack.enter_context(Pool.connect(node.socket, group.layout, group.credential)) for node in cluster.nodes
            ]
            result.left += _refill_group(cluster, group, pools, seed, result)
    return result


def _refill_group(cluster: Cluster, group: Group, pools: Sequence[Pool], seed: int, result: Refilled) -> int:
    clients = [LiveClient(pool, seed, window=1) for pool in pools]
    number = left = 0
    for _ in range(ROUNDS):
        for _ in range(max(len(clients), _slots(cluster, group) // SEGMENTS)):
            if not _store_one(clients[number % len(clients)], seed, number, result):
                # What has failed cannot be made good, and each further try would take as long.
                return _old_segments(pools[0], seed)
            number += 1
        left = max(_old_segments(pool, seed) for pool in pools)
        if not left:
            break
    return left


def _store_one(client: LiveClient, seed: int, number: int, result: Refilled) -> bool:
    """Served again and again until all of it is read back, as an engine does. False when it takes too long."""
    tokens = fresh_prompt(seed, number, SEGMENTS).tokens
    until = time.monotonic() + LIMIT_S
    result.asked += SEGMENTS
    while True:
        served = client.serve(tokens)
        result.wrong_bytes += served.wrong_bytes
        if served.hits == SEGMENTS or time.monotonic() > until:
            break
    result.stored += served.hits
    if served.hits < SEGMENTS:
        codes = ", ".join(f"{code.name} {count}" for code, count in served.stored.items()) or "nothing to store"
        cut = "nothing" if served.cut_by is None else served.cut_by.name
        result.stuck = (
            f"{client.pool.layout.model_id} at {client.pool.node}: {served.hits} found, cut by {cut}; {codes}"
        )
    return served.hits == SEGMENTS


def _slots(cluster: Cluster, group: Group) -> int:
    labels = (f'tenant="{group.tenant}"', f'slot_bytes="{group.layout.segment_bytes}"')
    return sum(
        int(value)
        for name, value in cluster.totals().items()
        if name.startswith("tokenlake_slots{") and all(label in name for label in labels)
    )


def _old_segments(pool: Pool, seed: int) -> int:
    """Of the engines' prompts, as this node finds them here or elsewhere."""
    found: set[SegmentKey] = set()
    for number in range(PROMPTS):
        keys = pool.prefix(prompt(seed, number).tokens).keys
        with pool.match(keys, deadline_s=1.0) as lease:
            codes = lease.codes
        found.update(key for key, code in zip(keys, codes, strict=True) if code in (Code.LOCAL, Code.REMOTE))
    return len(found)
