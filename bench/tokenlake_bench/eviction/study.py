"""Runs every eviction policy at every capacity and number of nodes on each trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokenlake.hints import Hints
from tokenlake.memory.eviction import EvictionPolicy
from tokenlake_bench.baselines import Accesses
from tokenlake_bench.eviction.bounds import Bounds
from tokenlake_bench.eviction.hints import hints
from tokenlake_bench.eviction.policies import STUDIED
from tokenlake_bench.eviction.results import Ceiling, Cell
from tokenlake_bench.eviction.stores import NodeStores
from tokenlake_bench.eviction.timed import Timed

SAMPLES = 16
"""Number of moments, spread evenly over the second half of a run, at which copies and segments without their parents
are counted."""
STEP = 200
"""Number of prompts between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The policies, numbers of nodes and hints of the runs that are made on each trace."""

    policies: Sequence[str]
    nodes: Sequence[int]
    hint_accuracy: float | None
    seed: int

    def cells(self, capacities: Sequence[int]) -> int:
        """Number of runs (one per policy, number of nodes and capacity) that the study makes on one trace."""
        return len(self.policies) * len(self.nodes) * len(capacities)


def ceiling_of(trace: str, bounds: Bounds, capacity_tokens: int) -> Ceiling:
    """The hit rates that no policy can exceed on a trace at a capacity."""
    return Ceiling(
        trace=trace,
        capacity_tokens=capacity_tokens,
        infinite=bounds.infinite().rate,
        clairvoyant=bounds.clairvoyant(capacity_tokens // bounds.accesses.segment_tokens).rate,
    )


def run_cells(
    trace: str, accesses: Accesses, capacities: Sequence[int], plan: Plan, advance: Callable[[int], None]
) -> Iterator[Cell]:
    """Run each policy at each capacity and number of nodes on one trace and yield the results, capacities in order.
    `advance` is called with the number of prompts served since its last call."""
    given = hints(accesses.prompts, plan.hint_accuracy, plan.seed)
    for capacity in capacities:
        for nodes in plan.nodes:
            for policy in plan.policies:
                run = _Run(accesses, nodes, capacity, policy, plan.seed)
                for start in range(0, len(accesses.prompts), STEP):
                    stop = min(start + STEP, len(accesses.prompts))
                    run.serve(given, start, stop)
                    advance(stop - start)
                yield run.cell(trace)


class _Run:
    """A run of one policy at one capacity and number of nodes, with the counts so far."""

    def __init__(self, accesses: Accesses, nodes: int, capacity_tokens: int, policy: str, seed: int) -> None:
        self._accesses = accesses
        self._nodes = nodes
        self._capacity_tokens = capacity_tokens
        self._name = policy
        self._policies: list[Timed] = []
        self._stores = NodeStores(accesses, nodes, capacity_tokens, self._policy, seed)
        self._hits = 0
        self._touches = 0
        self._cpu_s = self._wall_s = 0.0
        self._orphans = self._copies = self._held = 0
        """Sums over the moments at which copies and segments were counted."""

    def _policy(self) -> EvictionPolicy:
        self._policies.append(Timed(STUDIED[self._name]()))
        return self._policies[-1]

    def serve(self, hints_given: Sequence[Hints], start: int, stop: int) -> None:
        """Serve the prompts from number `start` up to, not including, `stop`."""
        prompts = self._accesses.prompts
        cpu, wall = time.process_time(), time.perf_counter()
        self._hits += sum(map(self._stores.serve, prompts[start:stop], hints_given[start:stop]))
        self._cpu_s += time.process_time() - cpu
        self._wall_s += time.perf_counter() - wall
        self._touches += sum(len(prompt.chain) for prompt in prompts[start:stop])
        every = max(1, len(prompts) // (2 * SAMPLES))
        if stop == len(prompts) or (2 * start >= len(prompts) and start // every != stop // every):
            self._orphans += self._stores.orphans()
            self._copies += self._stores.copies()
            self._held += self._stores.held()

    def cell(self, trace: str) -> Cell:
        """The result of the run, once all prompts are served."""
        # The policy's time is measured as wall time. Other processes delay the policy and the rest of the run alike, so
        # its share of the wall time is applied to the processor time.
        share = sum(policy.taken_ns for policy in self._policies) * 1e-9 / max(1e-9, self._wall_s)
        each_us = self._cpu_s * 1e6 / max(1, self._touches)
        return Cell(
            trace=trace,
            capacity_tokens=self._capacity_tokens,
            nodes=self._nodes,
            policy=self._name,
            hit_rate=self._hits * self._accesses.segment_tokens / max(1, self._accesses.prompt_tokens),
            orphan_share=self._orphans / max(1, self._held),
            copies_per_segment=self._copies / max(1, self._held),
            serve_us=each_us,
            policy_us=each_us * share,
        )
