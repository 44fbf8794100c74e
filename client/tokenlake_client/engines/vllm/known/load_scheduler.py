"""The loads that the ranks execute: from the time that their tokens are promised to vLLM until they end. Imports no
engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tokenlake_client.engines.vllm.known.load_cost import Owner
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan
from tokenlake_client.engines.vllm.load_worker import LoadTime
from tokenlake_client.lease import Lease


@dataclass(slots=True)
class _Load:
    plan: LoadPlan
    lease: Lease | None
    owners: tuple[Owner, ...]
    handed_out: bool = False
    """True once the ranks have got the plan of the load."""
    time: LoadTime | None = None
    """The longest duration that a rank has reported for the load; None before the first report."""
    ended: Callable[[], None] | None = None


class ScheduledLoads:
    """The loads that have not ended, at most one per request. Owns their leases. For the scheduler's thread."""

    def __init__(
        self,
        measured: Callable[[tuple[Owner, ...], LoadTime], None],
        report: Callable[[str, BaseException], None],
    ) -> None:
        """`measured` is called when a load ends, with the owner of each of its segments and the time that it took.
        `report` is called with the operation that failed and its error."""
        self._measured = measured
        self._report = report
        self._loads: dict[str, _Load] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._loads

    def add(
        self,
        plan: LoadPlan,
        lease: Lease | None = None,
        owners: tuple[Owner, ...] = (),
        ended: Callable[[], None] | None = None,
    ) -> None:
        """Add a load that was promised to vLLM. `lease` is released when the load ends, and then `ended` is called.
        `owners`: that of each segment that the load reads."""
        # End the request's previous load: the request may have lost its blocks in the step that loaded them, and may be
        # given new blocks before the outcome of that step is known.
        self.end(plan.request)
        self._loads[plan.request] = _Load(plan, lease, owners, ended=ended)

    def hand_out(self) -> tuple[LoadPlan, ...]:
        """The plans of the loads that the ranks do not have yet. The caller passes them to the ranks."""
        new = [load for load in self._loads.values() if not load.handed_out]
        for load in new:
            load.handed_out = True
        return tuple(load.plan for load in new)

    def add_times(self, times: Mapping[str, LoadTime]) -> None:
        """Record how long the ranks took for their loads, by request."""
        for request, time in times.items():
            load = self._loads.get(request)
            if load is not None:
                load.time = time if load.time is None else time.slower(load.time)

    def fail(self, blocks: set[int]) -> list[str]:
        """Mark the loads that should have filled some of `blocks`, which the ranks could not fill: their measured times
        count as those of loads that lost segments. Returns the requests of these loads."""
        failed = {name: load for name, load in self._loads.items() if not blocks.isdisjoint(load.plan.blocks)}
        for load in failed.values():
            if load.time is not None:
                load.time = replace(load.time, lost=max(1, load.time.lost))
        return list(failed)

    def end(self, request: str) -> None:
        """End the load of `request`, if there is one: release its lease and report its time."""
        load = self._loads.pop(request, None)
        if load is not None and load.lease is not None:
            try:
                load.lease.release()
                if load.ended is not None:
                    load.ended()
            except Exception as error:
                self._report("releasing a lease", error)
            if load.time is not None:
                self._measured(load.owners, load.time)

    def close(self) -> None:
        """End all loads: release their leases and report their times."""
        for request in list(self._loads):
            self.end(request)
