"""Study of locations: the bytes that go over slow links, with nodes and routers that know the domains and with
such that do not, on equal arrivals. Links within a domain are ten times as fast as those between domains.

python -m tokenlake_bench.simulation.topology --trace FILE --rate 24.8 --limit 4000 --seeds 0,1,2
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.memory import State
from tokenlake_bench.report import format_bytes, write_json
from tokenlake_bench.routing import SystemRow
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cluster import SimulatedCluster
from tokenlake_bench.simulation.command import SimulateArguments
from tokenlake_bench.simulation.network import Link, NetworkShape
from tokenlake_bench.simulation.planned import PlannedRoute
from tokenlake_bench.simulation.pooled import pool_options
from tokenlake_bench.simulation.pools import PoolSystem

FASTER = 10
"""So many times as fast as between domains is a link within a domain."""
BLIND, NODES, ROUTER, BOTH = "blind", "nodes", "router", "both"
VARIANTS: Final = {
    BLIND: "neither the nodes nor the router know the domains",
    NODES: "the nodes know the domains",
    ROUTER: "the router knows the domains",
    BOTH: "the nodes and the router know the domains",
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `between_domains`: bytes that engines read from nodes of other domains, `handed_over` bytes that
    hand-overs sent there. `apart`: share of the segments that have copies in more than one domain at the end."""

    pool: str
    variant: str
    seed: int
    row: SystemRow
    between_domains: int
    handed_over: int
    apart: float

    @property
    def slow(self) -> int:
        """All bytes between domains."""
        return self.between_domains + self.handed_over


def _run(pool: PoolSystem, variant: str, arrivals: Sequence[Arrival], given: SimulateArguments, of: int) -> Measured:
    """One run. `of`: nodes in a domain."""
    capacity_tokens, segment_tokens = given.size
    engine = given.engine()
    options = pool_options(
        engine,
        nodes=given.nodes,
        capacity_tokens=capacity_tokens,
        segment_tokens=segment_tokens,
        seed=given.seed,
        rules={},
    )
    usual = options.network.usual
    near = Link(usual.latency_s, FASTER * usual.bandwidth)
    options = replace(
        options, network=NetworkShape(usual, domain_nodes=of, near=near), labelled=variant in (NODES, BOTH)
    )
    run, route = pool.prepare(options, engine)
    cluster = run.simulation.cluster
    if isinstance(route, PlannedRoute):
        knowing = variant in (ROUTER, BOTH)
        route.router.locations = {
            node: (f"domain-{index // of}",) if knowing else ()
            for index, node in enumerate(route.router.instances.values())
        }
    run.run(arrivals, route=route)
    sent = cluster.network.between_domains
    return Measured(
        pool=pool.name,
        variant=variant,
        seed=given.seed,
        row=run.row(),
        between_domains=sent[False],
        handed_over=sent[True],
        apart=_apart(cluster, of),
    )


def _apart(cluster: SimulatedCluster, of: int) -> float:
    domains: dict[SegmentKey, set[int]] = {}
    for node in cluster.nodes:
        for segment in node.store.segments():
            if segment.state is State.READY:
                domains.setdefault(segment.key, set()).add(node.index // of)
    return sum(len(each) > 1 for each in domains.values()) / max(1, len(domains))


def study(
    arguments: Sequence[SimulateArguments], domains: int, variants: Sequence[str], console: Console
) -> list[Measured]:
    """Run every variant of every form of the pool with the arguments of every seed, one after the other. Raises
    ConfigurationError."""
    for name in variants:
        if name not in VARIANTS:
            raise ConfigurationError("variants", name, "some of " + ", ".join(VARIANTS))
    measured: list[Measured] = []
    for each in arguments:
        if domains < 1 or each.nodes % domains:
            raise ConfigurationError("domains", domains, f"a divisor of {each.nodes} nodes")
        _, arrivals = each.workload(console.print)
        for pool in each.pool_systems():
            # A router that knows no prefixes does not choose by where they are.
            chosen = [name for name in variants if pool.planned or name in (BLIND, NODES)]
            for name in chosen:
                measured.append(_run(pool, name, arrivals, each, each.nodes // domains))
                found = measured[-1]
                console.print(
                    f"seed {each.seed}, {pool.name}, {name}: hits {found.row.token_hit_rate:.2%}, in SLO "
                    f"{found.row.slo_attainment:.2%}; between domains {format_bytes(found.between_domains)} read, "
                    f"{format_bytes(found.handed_over)} handed over; copies in several domains: {found.apart:.2%}",
                    soft_wrap=True,
                )
    return measured


def table(measured: Sequence[Measured]) -> Table:
    """Means over the seeds, a row per form of the pool and variant. `read` and `handed over`: bytes between domains.
    `ratio`: their sum, to that of `blind`. `apart`: see `Measured`."""
    shown = Table(title=f"means over seeds {sorted({each.seed for each in measured})}")
    for column in ("pool", "variant"):
        shown.add_column(column)
    for column in ("hits", "in SLO", "read", "handed over", "ratio", "apart"):
        shown.add_column(column, justify="right")
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.pool, each.variant), []).append(each)
    for (pool, variant), group in groups.items():
        rows = [each.row for each in group]
        shown.add_row(
            pool,
            variant,
            f"{mean(row.token_hit_rate for row in rows):.2%}",
            f"{mean(row.slo_attainment for row in rows):.2%}",
            format_bytes(mean(each.between_domains for each in group)),
            format_bytes(mean(each.handed_over for each in group)),
            _ratio(group, groups.get((pool, BLIND))),
            f"{mean(each.apart for each in group):.1%}",
        )
    return shown


def _ratio(group: Sequence[Measured], blind: Sequence[Measured] | None) -> str:
    slow = sum(each.slow for each in blind) if blind else 0
    return f"{sum(each.slow for each in group) / slow:.2f} x" if slow else ""


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--nodes", default=64, show_default=True)
@click.option("--domains", default=8, show_default=True)
@click.option("--capacity-tokens", default=24_000_000, show_default=True)
@click.option("--limit", type=int, help="Number of requests, from the trace's beginning.")
@click.option("--rate", type=float, help="Requests per second; the trace's own rate without it.")
@click.option("--swarm", type=int, help="Parallel agents that begin together, every 20 s.")
@click.option("--pools", default="pool-planned-real", show_default=True)
@click.option("--seeds", default="0", show_default=True, help="Separated by commas.")
@click.option(
    "--variants",
    default=",".join(VARIANTS),
    show_default=True,
    help="; ".join(f"{name}: {what}" for name, what in VARIANTS.items()) + ".",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(domains: int, seeds: str, variants: str, json_file: Path | None, **arguments: Any) -> None:
    """Compare placement that knows the domains of nodes with placement that does not."""
    console = Console()
    try:
        given: Mapping[str, Any] = {"baselines": "none", **arguments}
        runs = [SimulateArguments(seed=int(seed), **given) for seed in seeds.split(",")]
        measured = study(runs, domains, variants.split(","), console)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        write_json(measured, json_file)
    console.print(table(measured))


if __name__ == "__main__":
    sys.exit(main())
