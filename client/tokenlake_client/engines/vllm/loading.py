"""Loads that the ranks are told of, from their promise to vLLM until they end. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tokenlake_client.engines.vllm.lookup import AskedLease
from tokenlake_client.engines.vllm.plan import LoadPlan, LoadTime

__all__ = ["Loading"]


@dataclass(slots=True)
class _Load:
    plan: LoadPlan
    lease: AskedLease | None
    owners: tuple[str, ...]
    step: int = 0
    """That it was handed out in; 0 before."""
    took: LoadTime | None = None
    """On the slowest rank so far."""


class Loading:
    """At most one load of each request. For the scheduler's thread."""

    def __init__(self, measured: Callable[[tuple[str, ...], LoadTime], None]) -> None:
        """`measured` is called with the nodes of a load's segments and what it took."""
        self._measured = measured
        self._loads: dict[str, _Load] = {}

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    def __contains__(self, request: str) -> bool:
        return request in self._loads

    def add(self, plan: LoadPlan, lease: AskedLease | None = None, owners: tuple[str, ...] = ()) -> None:
        """Promised. `lease`: released when it ends. `owners`: the node of each segment that it reads."""
        # A request that lost its blocks in the step that loaded them comes back before that step's outcome.
        self.ended(plan.request)
        self._loads[plan.request] = _Load(plan, lease, owners)

    def hand_out(self, step: int) -> tuple[LoadPlan, ...]:
        """What the ranks have not been told of yet; they are told in `step`."""
        new = [load for load in self._loads.values() if not load.step]
        for load in new:
            load.step = step
        return tuple(load.plan for load in new)

    def took(self, times: Mapping[str, LoadTime]) -> None:
        """What ranks measured of loads, by request."""
        for request, took in times.items():
            load = self._loads.get(request)
            if load is not None:
                load.took = took if load.took is None else took.longer(load.took)

    def failed(self, blocks: set[int]) -> list[str]:
        """Requests that load into one of these blocks, which were not filled."""
        hit = {name: load for name, load in self._loads.items() if not blocks.isdisjoint(load.plan.blocks)}
        for load in hit.values():
            if load.took is not None:
                load.took = replace(load.took, lost=max(1, load.took.lost))
        return list(hit)

    def ended(self, request: str) -> None:
        """The load of `request`, if there is one, needs its lease no more."""
        load = self._loads.pop(request, None)
        if load is not None and load.lease is not None:
            load.lease.release()
            if load.took is not None:
                self._measured(load.owners, load.took)

    def ended_until(self, step: int) -> None:
        """All that were handed out up to `step` ended with it."""
        for request in [name for name, load in self._loads.items() if 0 < load.step <= step]:
            self.ended(request)

    def close(self) -> None:
        """Give back all leases."""
        for request in list(self._loads):
            self.ended(request)
