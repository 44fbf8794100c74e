"""Goodput of a fleet: the highest rate at which 90 % of the requests meet their objective.

python -m tokenlake_bench.simulation.goodput --trace FILE --nodes 8 --limit 1000 --systems pool,cache-aware-real
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.cache_hit import CacheHitArguments
from tokenlake_bench.report import table, write_json
from tokenlake_bench.routing import SYSTEMS, SystemRow, at_rate, run_system
from tokenlake_bench.simulation.arrivals import Arrival, accesses_of, arrivals_of
from tokenlake_bench.simulation.command import prepare
from tokenlake_bench.simulation.pooled import POOL
from tokenlake_bench.simulation.pools import POOLS

SHARE: Final = 0.9
"""Share of the requests that must meet their objective at the searched rate."""
STEP: Final = 1.05
"""Ratio of two neighbouring request rates of the search."""
LOWEST, HIGHEST = 1 / 64, 1024.0
"""Lowest and highest request rate of the search, as multiples of the workload's own rate."""
_HIGHEST_STEP: Final = math.floor(math.log(HIGHEST, STEP))


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
    lowest, highest = math.floor(math.log(LOWEST, STEP)), _HIGHEST_STEP
    good = bad = None
    at, stride = start, 1
    while good is None or bad is None:
        if share_at(at) >= SHARE:
            if at == highest:
                return at
            good, at = at, min(highest, at + stride)
        else:
            if at == lowest:
                return None
            bad, at = at, max(lowest, at - stride)
        stride *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        if share_at(middle) >= SHARE:
            good = middle
        else:
            bad = middle
    return good


def _run(name: str, arrivals: Sequence[Arrival], arguments: CacheHitArguments) -> SystemRow:
    if name in POOLS:
        run = prepare(arguments, POOLS[name])
        run.run(arrivals)
        return run.row()
    return run_system(accesses_of(arrivals, arguments.size[1]), SYSTEMS[name], arguments.fleet(arguments.engine()))


def goodput(arguments: CacheHitArguments, systems: Sequence[str], *, say: Callable[[str], object]) -> Goodput:
    """Search the goodput of every system. `say` is called with a line of text per simulated rate. Raises
    ConfigurationError."""
    for name in systems:
        if name not in (*POOLS, *SYSTEMS):
            raise ConfigurationError("systems", name, "some of " + ", ".join((*POOLS, *SYSTEMS)))
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
        shares={name: [] for name in systems},
    )

    def share_at(name: str, step: int) -> float:
        rate = own_rate * STEP**step
        share = _run(name, arrivals_of(at_rate(accesses, rate)), arguments).slo_attainment
        result.shares[name].append((rate, share))
        say(f"{name}: {share:.1%} at {rate:.2f} requests/s")
        return share

    for name in systems:
        best = highest_rate(partial(share_at, name))
        if best == _HIGHEST_STEP:
            say(f"{name}: not a goodput, the objective is met at the highest rate that is tried")
        result.rates[name] = 0.0 if best is None else own_rate * STEP**best
        write_json(result, arguments.json_file)
    return result


@click.command()
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A trace, as bench cache-hit reads."
)
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity-tokens", type=int)
@click.option("--engine-cache-tokens", type=int, help="GPU cache of each instance; --capacity-tokens lie behind it.")
@click.option(
    "--limit", type=int, default=1000, show_default=True, help="Number of requests, from the trace's beginning."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--model")
@click.option("--gpu")
@click.option("--systems", default=f"{POOL},cache-aware-perfect", show_default=True)
@click.option("--open-loop", is_flag=True, help="Requests of sessions arrive at their recorded times.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Result file, written after every search.",
)
def main(systems: str, **arguments: Any) -> None:
    """Search the highest rate at which 90 % of the requests meet their objective, for each system."""
    console = Console()
    try:
        result = goodput(CacheHitArguments(**arguments), systems.split(","), say=console.print)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    title = f"{result.requests:,} requests, {result.nodes} nodes: most requests/s with {SHARE:.0%} within objective"
    console.print(table(title, (), [(name, f"{rate:.2f}") for name, rate in result.rates.items()]))


if __name__ == "__main__":
    sys.exit(main())
