"""After the load: checks that every slot still takes a segment.

As many new segments are stored as there are slots, through every node; each is read back and compared. Then all daemons
but the first, which ran as long as the soak, are ended. The earlier segments get a low priority, and the first daemon
stores as many others as it has slots: none of the earlier segments may be left, as a segment that is pinned forever
would be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.soak.load import GROUPS, PROMPTS, Group, Prompt, fresh_prompt, prompt
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

SEGMENTS: Final = 2
"""Number of segments of a prompt that the check stores: no more than a node may keep as cached copies. With more,
leased cached copies of the last segments could occupy the slots that the first segments need for their fetch."""
LIMIT_S: Final = 15.0
"""Seconds within which one prompt must be stored and read back. A store is delayed while the bound on segments being
written is reached, or while a region changes its tenant."""
_REFILL: Final = 1
_DISPLACE: Final = 1_000_000
"""Number of the first new prompt that `refill` uses, and of the first one of `displace`, so far apart that no prompt is
used twice."""


@dataclass
class Refilled:
    """Result of the check after the load: numbers of segments that were to be stored, that were stored and read back,
    and of bytes that were wrong."""

    asked: int = 0
    stored: int = 0
    wrong_bytes: int = 0
    stuck: str = ""
    """Outcome of the first prompt that could not be stored and read back."""


def refill(cluster: Cluster, seed: int) -> Refilled:
    """Store new prompts of all groups through every node, and read each back. Raises TokenLakeError when a daemon does
    not answer."""
    result = Refilled()
    for group in GROUPS:
        with ExitStack() as stack:
            pools = [
                stack.enter_context(Pool.connect(node.socket, group.layout, group.credential)) for node in cluster.nodes
            ]
            _store_many(pools, seed, _REFILL, _slots(cluster.totals(), group), result)
    return result


def displace(node: Node, seed: int) -> int:
    """Number of earlier segments that are left after the node stored as many others as it has slots. The other nodes
    have ended, so that it owns all of them. Raises TokenLakeError when it does not answer."""
    stayed = 0
    for group in GROUPS:
        with Pool.connect(node.socket, group.layout, group.credential) as pool:
            slots = _slots(node.metrics(), group)
            before = [prompt(seed, number) for number in range(PROMPTS)]
            before += [fresh_prompt(seed, _REFILL + number, SEGMENTS) for number in range(slots)]
            for each in before:
                # The new segments shall evict all earlier ones. The earlier ones get a low priority, because the
                # eviction policy would otherwise keep the valuable ones of them.
                pool.hint(pool.prefix(each.tokens).keys, Hints(priority=-1))
            # While the segments are stored the tenant may get one region more, and then has more slots than before.
            result = Refilled()
            while result.asked == result.stored < slots:
                _store_many([pool], seed, _DISPLACE + result.asked, slots - result.stored, result)
                slots = _slots(node.metrics(), group)
            stayed += len({key for each in before for key in _found(pool, each)})
    return stayed


def _store_many(pools: Sequence[Pool], seed: int, first: int, segments: int, result: Refilled) -> None:
    """Store new prompts of `segments` segments in all, through the pools in turn, and read each back. `first`: number
    of the first prompt. The outcome is added to `result`."""
    clients = [LiveClient(pool, seed, window=1) for pool in pools]
    for number in range(-(-segments // SEGMENTS)):
        if not _store_one(clients[number % len(clients)], seed, first + number, result):
            # The check ends here, because further prompts would probably fail too, each of them only at its deadline.
            return


def _found(pool: Pool, prompt: Prompt) -> list[SegmentKey]:
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys, deadline_s=1.0) as lease:
        return [key for key, code in zip(keys, lease.codes, strict=True) if code == Code.LOCAL]


def _store_one(client: LiveClient, seed: int, number: int, result: Refilled) -> bool:
    """Serve the prompt repeatedly, as an engine does, until all of it was read back. Returns False at the deadline."""
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
