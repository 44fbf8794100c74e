"""A scheduler of its own making over the pool's control plane: continuous batching over several engine instances.

Each iteration takes what waits, forms a batch for every idle instance, asks the pool which instance shall run which
batch and how it shall use what is cached, and counts the decode steps of what runs. It moves no cache and knows no
node: engines carry out the plans. Run by `tests/client/test_control_plane.py` against real daemons.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenlake.planner import QueryPlan, Request, TransferPlan
from tokenlake_client.control import ControlPlane

BATCH_TOKENS = 4096
"""New tokens that one batch prefills; a prompt with more is a batch of its own, on as many instances as it needs."""
BUSY = 0.9
"""No prefill is begun while the pool itself would need so much of some node."""


@dataclass(frozen=True)
class Work:
    """One batch: prefill `requests` on `instances` as the plans say, then decode them there."""

    requests: tuple[Request, ...]
    instances: tuple[str, ...]
    query_plan: QueryPlan
    transfer_plan: TransferPlan


@dataclass
class Scheduler:
    """First come, first served; batches share instances with nobody until their last request is done."""

    plane: ControlPlane
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[str, int] = field(default_factory=dict)
    """Decode steps left, by instance."""

    def add(self, request: Request) -> None:
        """It runs in one of the next iterations."""
        self.waiting.append(request)

    def step(self) -> list[Work]:
        """One iteration: what begins now. Decode steps of what runs go on by one."""
        self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
        idle = [name for name in self.plane.instances if name not in self.running]
        if not idle or not self.waiting:
            return []
        candidates = [self.waiting[index] for index in range(min(len(self.waiting), 8 * len(idle)))]
        tree = self.plane.get_prefix_tree(candidates)
        new = [request.tokens - hit for request, hit in zip(candidates, tree.hit_tokens, strict=True)]
        batches, dops = self._batches(new, len(idle))
        load = self.plane.get_cache_load([index for batch in batches for index in batch], tree)
        if self.running and load and max(load.values()) > BUSY:
            return []
        plans = self.plane.gen_plans(batches, dops, tree, idle)
        begun = []
        for batch, group, query, transfer in zip(
            batches, plans.groups, plans.query_plans, plans.transfer_plans, strict=True
        ):
            requests = tuple(candidates[index] for index in batch)
            steps = max(request.answer_tokens or 1 for request in requests)
            self.running |= dict.fromkeys(group, steps)
            begun.append(Work(requests, group, query, transfer))
        # Batches take requests in order, so those that begin are the first.
        for _ in range(sum(len(batch) for batch in batches)):
            self.waiting.popleft()
        return begun

    def _batches(self, new: list[int], idle: int) -> tuple[list[list[int]], list[int]]:
        """Requests in order, each batch within its tokens, and how many instances each gets."""
        batches: list[list[int]] = []
        dops: list[int] = []
        room = 0
        for index, tokens in enumerate(new):
            if batches and tokens <= room:
                batches[-1].append(index)
                room -= tokens
                continue
            dop = max(1, -(-tokens // BATCH_TOKENS))
            dop = min(dop, idle - sum(dops))
            if dop < 1:
                break
            batches.append([index])
            dops.append(dop)
            room = BATCH_TOKENS - tokens
        return batches, dops
