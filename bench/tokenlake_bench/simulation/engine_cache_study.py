"""Study of the pool behind GPU caches: routers that know these caches, engines that offer the pool fewer segments, and
pools that use the memory of the GPUs. Each variant is compared with the pool as it is built, on equal arrivals.

python -m tokenlake_bench.simulation.engine_cache_study --trace FILE --rates 7.69,8.46 --seeds 0,1,2
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.planner import Request, Router
from tokenlake.planner.router import Owners, Start
from tokenlake_bench.report import write_json
from tokenlake_bench.routing import SYSTEMS, SystemRow, at_rate, run_system
from tokenlake_bench.routing.engine_cache import EngineCache
from tokenlake_bench.simulation.arrivals import Arrival, accesses_of, arrivals_of, keys_of
from tokenlake_bench.simulation.cached import CachedEngine
from tokenlake_bench.simulation.cluster import Send
from tokenlake_bench.simulation.command import SimulateArguments
from tokenlake_bench.simulation.engine import RequestOutcome
from tokenlake_bench.simulation.goodput import SHARE
from tokenlake_bench.simulation.gpu_tiers import GIVEN, GpuExclusive, GpuRead, GpuRoute, gpu_sizes
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.planned import PlannedRoute
from tokenlake_bench.simulation.pooled import PooledRun, pool_options
from tokenlake_bench.simulation.pools import POOL_PLANNED_REAL

__all__ = ["VARIANTS", "Measured", "main", "study"]

BUILT, KNOWS, RECORDS, MISSING, COMPUTED, READ, EXCLUSIVE = (
    POOL_PLANNED_REAL,
    "router-knows",
    "router-records",
    "offers-missing",
    "offers-computed",
    "gpu-read",
    "gpu-exclusive",
)
VARIANTS: Final = {
    BUILT: "the pool as it is built",
    KNOWS: "the router knows the content of the GPU caches, exactly and at once",
    RECORDS: "the router keeps a record of the prompts that it sent, as an estimate of each GPU cache",
    MISSING: "a request offers the pool only segments that its lookup did not find",
    COMPUTED: "a request offers the pool only segments that it computed",
    "gpu-added": "the pool's memory grows by as much as all GPU caches have",
    **{name: f"the pool gets {part:.3g} of the memory of each GPU cache" for name, part in GIVEN.items()},
    READ: "a request also reads from the GPU caches of other instances",
    EXCLUSIVE: "the same, and a segment is stored when it leaves a GPU cache",
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the result of `variant` at `rate` requests per second, with the draws of `seed`."""

    variant: str
    asked: float | None
    """The rate asked for; None for the trace's own, which the seed changes a little."""
    rate: float
    seed: int
    row: SystemRow


# -- engines that offer fewer segments


class _OffersMissing(CachedEngine):
    def _first_offered(self, served: RequestOutcome) -> int:
        return min(served.found, served.hits)


class _OffersComputed(CachedEngine):
    def _first_offered(self, served: RequestOutcome) -> int:
        return served.hits


# -- routers that know GPU caches


class _Knows(Router):
    """A router for which the segments in `caches`, the GPU caches of the instances, are cached at their instances:
    these are loaded from nowhere."""

    def __init__(
        self, instances: Mapping[str, NodeId], options: SimulationOptions, caches: Sequence[EngineCache]
    ) -> None:
        """`instances`: in the order of `caches`."""
        layout = options.segment_layout
        super().__init__(instances, options.segment_tokens, layout.segment_bytes, seed=options.seed)
        self._gpu = dict(zip(self.instances, caches, strict=True))
        self.segments: dict[SegmentKey, int] = {}
        """The ids of the segments in the caches, by key."""

    def starts(self, request: Request, owners: Owners, among: Iterable[str] | None = None) -> list[Start]:
        known: dict[SegmentKey, Collection[NodeId]] = {key: set(nodes) for key, nodes in owners.items() if nodes}
        for instance, found in self._found(request).items():
            for key in request.keys[:found]:
                if key in known:
                    known[key] = {*known[key], self.instances[instance]}
        return super().starts(request, known, among)

    def further(self, request: Request, depth: int) -> dict[str, int]:
        reach = super().further(request, depth)
        for instance, found in self._found(request).items():
            if found > depth + reach.get(instance, 0):
                reach[instance] = found - depth
        return reach

    def _found(self, request: Request) -> Mapping[str, int]:
        """By instance, the number of segments from the prompt's beginning that its GPU cache has."""
        chain = self._chain(request)
        return {instance: cache.match(chain) for instance, cache in self._gpu.items()}

    def _chain(self, request: Request) -> tuple[int, ...]:
        return tuple(self.segments[key] for key in self._keys(request))


class _Records(_Knows):
    """A router whose knowledge are caches of its own, which it keeps as if each request took GPU memory from the moment
    at which it is sent until it is answered. It does not know the length of an answer, and takes the expected one."""

    def __init__(
        self, instances: Mapping[str, NodeId], options: SimulationOptions, caches: Sequence[EngineCache]
    ) -> None:
        super().__init__(instances, options, [EngineCache(each.capacity) for each in caches])
        self._numbers = count()
        self._sent: dict[str, tuple[EngineCache, int]] = {}
        self._tokens = options.segment_tokens

    def sent(self, request: Request, start: Start) -> None:
        super().sent(request, start)
        chain, cache, number = self._chain(request), self._gpu[start.instance], next(self._numbers)
        tokens = request.tokens + round(self.rates.answer_tokens.value)
        self._sent[request.name] = cache, number
        cache.begin(number, chain, -(-tokens // self._tokens) - len(chain))

    def finished(self, name: str) -> None:
        super().finished(name)
        if name in self._sent:
            cache, number = self._sent.pop(name)
            cache.end(number)


class _KnowingRoute(PlannedRoute):
    """A route whose router is `kind`, with the GPU caches of `engines`."""

    def __init__(self, run: PooledRun, engines: Sequence[CachedEngine], kind: type[_Knows]) -> None:
        super().__init__(run)
        options = run.simulation.options
        self._key_seed = options.seed
        self._knowing = self.router = kind(self.router.instances, options, [each.cache for each in engines])

    def __call__(self, number: int, arrival: Arrival, send: Send) -> None:
        keys, chain = keys_of(arrival.chain, self._key_seed), arrival.chain.tolist()
        for at, segment in enumerate(chain):
            self._knowing.segments[SegmentKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])] = segment
        super().__call__(number, arrival, send)


# -- runs


def _run(
    variant: str, arrivals: Sequence[Arrival], arguments: SimulateArguments, engine_cache_tokens: int
) -> SystemRow:
    capacity_tokens, segment_tokens = arguments.size
    engine = arguments.engine()
    if variant in SYSTEMS:
        return run_system(accesses_of(arrivals, segment_tokens), SYSTEMS[variant], arguments.fleet(engine))
    capacity_tokens, engine_cache_tokens = gpu_sizes(variant, arguments.nodes, capacity_tokens, engine_cache_tokens)
    options = pool_options(
        engine,
        nodes=arguments.nodes,
        capacity_tokens=capacity_tokens,
        segment_tokens=segment_tokens,
        seed=arguments.seed,
        rules={},
    )
    engines: list[CachedEngine] = []
    fleet: list[GpuRead] = []
    kinds: dict[str, Callable[..., CachedEngine]] = {
        MISSING: _OffersMissing,
        COMPUTED: _OffersComputed,
        READ: partial(GpuRead, fleet=fleet),
        EXCLUSIVE: partial(GpuExclusive, fleet=fleet),
    }

    def instance(*given: Any) -> CachedEngine:
        engines.append(kinds.get(variant, CachedEngine)(*given, engine_cache_tokens=engine_cache_tokens))
        return engines[-1]

    run = PooledRun(options, engine, counts_memory=True, instance=instance)
    knows = {KNOWS: _Knows, RECORDS: _Records}.get(variant)
    route = GpuRoute(run, fleet) if fleet else PlannedRoute(run)
    run.run(arrivals, route=route if knows is None else _KnowingRoute(run, engines, knows))
    return run.row()


def study(
    arguments: Sequence[SimulateArguments], rates: Sequence[float | None], names: Sequence[str], console: Console
) -> list[Measured]:
    """Run every variant at every rate (None: the trace's own) with the arguments of every seed, one after the other.
    Raises ConfigurationError."""
    for name in names:
        if name not in (*VARIANTS, *SYSTEMS):
            raise ConfigurationError("variants", name, "some of " + ", ".join((*VARIANTS, *SYSTEMS)))
    measured: list[Measured] = []
    for each in arguments:
        if each.engine_cache_tokens is None:
            raise ConfigurationError("engine_cache_tokens", "", "a number of tokens")
        _, recorded = each.workload(console.print)
        accesses = accesses_of(recorded, each.size[1])
        own = (len(recorded) - 1) / max(1e-9, recorded[-1].at_s - recorded[0].at_s)
        for rate, name in product(rates, names):
            arrivals = recorded if rate is None else arrivals_of(at_rate(accesses, rate))
            row = _run(name, arrivals, each, each.engine_cache_tokens)
            measured.append(Measured(variant=name, asked=rate, rate=rate or own, seed=each.seed, row=row))
            console.print(
                f"seed {each.seed}, {rate or own:.3f} requests/s, {name}: hits {row.token_hit_rate:.1%}, "
                f"of these in the GPU {row.engine_share:.1%}, other nodes {row.remote_share:.1%}; "
                f"in SLO {row.slo_attainment:.2%}, {row.goodput_rps:.4f}/s; TTFT p50 {row.ttft_p50_ms:.0f} ms",
                soft_wrap=True,
            )
    return measured


def rate_at_share(points: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which the line of least squares through measured (rate, share of the requests within their objective)
    falls to `SHARE`; None where it lies outside the measured rates, or does not fall. Single runs differ by more than
    the variants do; the line uses all of them."""
    rates = [rate for rate, _ in points]
    if len(set(rates)) < 2:
        return None
    slope, at_zero = linear_regression(rates, [share for _, share in points])
    rate = (SHARE - at_zero) / slope if slope < 0 else math.inf
    return rate if min(rates) <= rate <= max(rates) else None


def table(measured: Sequence[Measured]) -> Table:
    """Means over the seeds, a row per rate and variant; below them the goodput of each variant by `rate_at_share`."""
    shown = Table(title=f"means over seeds {sorted({each.seed for each in measured})}")
    for column in ("requests/s", "variant", "hits", "in the GPU", "other nodes", "in SLO", "in SLO/s", "TTFT p50 ms"):
        shown.add_column(column, justify="left" if column == "variant" else "right")
    points: dict[str, list[tuple[float, float]]] = {}
    by_place: dict[tuple[float | None, str], list[Measured]] = {}
    for each in measured:
        by_place.setdefault((each.asked, each.variant), []).append(each)
    for (_, variant), group in sorted(by_place.items(), key=lambda item: item[0][0] or 0.0):
        rows = [each.row for each in group]
        rate, share = mean(each.rate for each in group), mean(row.slo_attainment for row in rows)
        points.setdefault(variant, []).extend(
            (each.rate, each.row.slo_attainment) for each in group if each.asked is not None
        )
        shown.add_row(
            f"{rate:.3f}",
            variant,
            f"{mean(row.token_hit_rate for row in rows):.1%}",
            f"{mean(row.engine_share for row in rows):.1%}",
            f"{mean(row.remote_share for row in rows):.1%}",
            f"{share:.2%}",
            f"{mean(row.goodput_rps for row in rows):.4f}",
            f"{mean(row.ttft_p50_ms for row in rows):.0f}",
        )
    reached = {variant: rate_at_share(shares) for variant, shares in points.items()}
    shown.caption = "; ".join(
        f"{variant}: {SHARE:.0%} in SLO at {rate:.2f} requests/s"
        for variant, rate in reached.items()
        if rate is not None
    )
    return shown


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--nodes", default=8, show_default=True)
@click.option("--capacity-tokens", default=8_000_000, show_default=True)
@click.option("--engine-cache-tokens", default=400_000, show_default=True)
@click.option("--limit", default=2000, show_default=True, help="Number of requests, from the trace's beginning.")
@click.option("--rates", help="Requests per second, separated by commas; the trace's own rate without it.")
@click.option("--seeds", default="0", show_default=True, help="Separated by commas.")
@click.option(
    "--variants",
    default=",".join(VARIANTS),
    show_default=True,
    help="; ".join(f"{name}: {what}" for name, what in VARIANTS.items()) + "; or names of compared systems.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(rates: str | None, seeds: str, variants: str, json_file: Path | None, **arguments: Any) -> None:
    """Compare variants of the pool behind GPU caches."""
    console = Console()
    try:
        measured = study(
            [SimulateArguments(seed=int(seed), **arguments) for seed in seeds.split(",")],
            [None] if rates is None else [float(rate) for rate in rates.split(",")],
            variants.split(","),
            console,
        )
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        write_json(measured, json_file)
    console.print(table(measured))


if __name__ == "__main__":
    sys.exit(main())
