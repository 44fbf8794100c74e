"""Goodput of a fleet: the highest rate at which 90 % of the requests meet their objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.report import write_json
from tokenlake_bench.routing import System, SystemRow, at_rate, run_system
from tokenlake_bench.simulation.arrivals import Arrival, accesses_of, arrivals_of
from tokenlake_bench.simulation.pools import PoolSystem

SHARE: Final = 0.9
"""Share of the requests that must meet their objective at the searched rate."""
STEP: Final = 1.05
"""Ratio of two neighbouring request rates of the search."""
LOWEST, HIGHEST = math.floor(math.log(1 / 64, STEP)), math.floor(math.log(1024.0, STEP))
"""Steps of the lowest and of the highest request rate of the search, from the workload's own rate."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search for the goodput, the highest rate at which enough requests meet their objective. `rates`:
    requests per second by system; 0 where no rate was low enough. A rate is that of the recorded times, moved by one
    factor: where requests follow answers, only the beginnings of the sessions move, and the pauses stay, so that a few
    sessions may meet it at the highest rate that is tried. `shares`: the share of requests that met their objective at
    each tried rate."""

    model: str
    gpu: str
    nodes: int
    engine_cache_tokens: int | None = None
    requests: int
    own_rate: float
    rates: dict[str, float]
    shares: dict[str, list[tuple[float, float]]]


def highest_rate(share_at: Callable[[int], float], start: int = 0) -> int | None:
    """The highest step of the rate at which `share_at(step)` is at least `SHARE` while it is lower one step above; None
    where that would be below the lowest rate. If the share does not fall steadily, the result is one such step, rather
    near `start`."""
    good = bad = None
    at, stride = start, 1
    while good is None or bad is None:
        if share_at(at) >= SHARE:
            if at == HIGHEST:
                return at
            good, at = at, min(HIGHEST, at + stride)
        else:
            if at == LOWEST:
                return None
            bad, at = at, max(LOWEST, at - stride)
        stride *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if share_at(middle) >= SHARE:
            good = middle
        else:
            bad = middle
    return good


def simulated(system: PoolSystem | System, arrivals: Sequence[Arrival], arguments: CacheHitArguments) -> SystemRow:
    """The row of a form of the pool, or of another system."""
    if isinstance(system, PoolSystem):
        run = arguments.run_of(system)
        run.run(arrivals)
        return run.row()
    return run_system(accesses_of(arrivals, arguments.size[1]), system, arguments.fleet(arguments.engine()))


def search(arguments: CacheHitArguments, say: Callable[[str], object]) -> Goodput:
    """Search the goodput of every form of the pool and every other system of the arguments, and write the JSON file
    after each. `say` is called with a line of text per simulated rate. Raises TokenLakeError."""
    _, arrivals = arguments.arrivals()
    accesses = accesses_of(arrivals, arguments.size[1])
    own_rate = (len(arrivals) - 1) / max(1e-9, arrivals[-1].at_s - arrivals[0].at_s)
    engine = arguments.engine()
    result = Goodput(
        model=engine.model.name,
        gpu=engine.gpu.name,
        nodes=arguments.nodes,
        engine_cache_tokens=arguments.engine_cache_tokens,
        requests=len(arrivals),
        own_rate=own_rate,
        rates={},
        shares={},
    )
    systems: list[PoolSystem | System] = [*arguments.pool_systems(), *arguments.systems()]
    for system in systems:

        def share_at(step: int, system: PoolSystem | System = system) -> float:
            rate = own_rate * STEP**step
            share = simulated(system, arrivals_of(at_rate(accesses, rate)), arguments).slo_attainment
            result.shares.setdefault(system.name, []).append((rate, share))
            say(f"{system.name}: {share:.1%} at {rate:.2f} requests/s")
            return share

        best = highest_rate(share_at)
        if best == HIGHEST:
            say(f"{system.name}: not a goodput, the objective is met at the highest rate that is tried")
        result.rates[system.name] = 0.0 if best is None else own_rate * STEP**best
        write_json(result, arguments.json_file)
    return result
