"""After the load: does every slot still take a segment?

As many fresh segments are stored as there are slots, through every node; each is read again and compared. Then the
first daemon, which lived as long as the run, is alone and takes as many as it has slots: nothing that was there before
may be left, as a segment that somebody holds forever would be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.soak.load import GROUPS, PROMPTS, Group, Prompt, fresh_prompt, prompt
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

__all__ = ["Refilled", "displace", "refill"]

SEGMENTS: Final = 2
"""Of a fresh prompt: no more than the least budget of cached copies. With more, the lease of the last ones, cached
here, could hold the places that the first ones need to be fetched into."""
LIMIT_S: Final = 15.0
"""For one prompt. A write budget that is used up, or a region that changes hands, makes a store wait."""
DEAD_S: Final = 60.0
"""For the first daemon to notice that the others are gone."""
_REFILL: Final = 1
_DISPLACE: Final = 1_000_000
"""First numbers of fresh prompts."""


@dataclass
class Refilled:
    """Counts of segments."""

    asked: int = 0
    stored: int = 0
    wrong_bytes: int = 0
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
            _store_many(pools, seed, _REFILL, _slots(cluster.totals(), group), result)
    return result


def displace(node: Node, seed: int) -> int:
    """How many of the segments that it had are still there after it took as many others as it has slots. The other
    nodes have ended, so that it keeps all it is given. Raises TokenLakeError when it does not answer."""
    _await_primary_copies(node)
    stayed = 0
    for group in GROUPS:
        with Pool.connect(node.socket, group.layout, group.credential) as pool:
            slots = _slots(node.metrics(), group)
            _store_many([pool], seed, _DISPLACE, slots, Refilled())
            before = [prompt(seed, number) for number in range(PROMPTS)]
            before += [fresh_prompt(seed, _REFILL + number, SEGMENTS) for number in range(slots)]
            stayed += len({key for each in before for key in _found(pool, each)})
    return stayed


def _await_primary_copies(node: Node) -> None:
    """Copies of what others hold are no victims of what is stored; they become primary copies once the others are taken
    for dead. What does not become one within the limit stays, and is found."""
    until = time.monotonic() + DEAD_S
    while time.monotonic() < until:
        metrics = node.metrics()
        if not any(count for name, count in metrics.items() if name.startswith("tokenlake_segments{") and _copy(name)):
            return
        time.sleep(0.1)


def _copy(name: str) -> bool:
    return 'kind="cached"' in name or 'kind="replica"' in name


def _store_many(pools: Sequence[Pool], seed: int, first: int, segments: int, result: Refilled) -> None:
    clients = [LiveClient(pool, seed, window=1) for pool in pools]
    for number in range(-(-segments // SEGMENTS)):
        if not _store_one(clients[number % len(clients)], seed, first + number, result):
            # What has failed cannot be made good, and each further try would take as long.
            return


def _found(pool: Pool, prompt: Prompt) -> list[SegmentKey]:
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys, deadline_s=1.0) as lease:
        return [key for key, code in zip(keys, lease.codes, strict=True) if code == Code.LOCAL]


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


def _slots(metrics: Mapping[str, float], group: Group) -> int:
    labels = (f'tenant="{group.tenant}"', f'slot_bytes="{group.layout.segment_bytes}"')
    return sum(
        int(value)
        for name, value in metrics.items()
        if name.startswith("tokenlake_slots{") and all(label in name for label in labels)
    )
