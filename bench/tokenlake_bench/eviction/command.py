"""The command `bench eviction`: the hits of eviction policies on traces, beside the bounds that no policy exceeds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake_bench.baselines import Accesses, intern_segments
from tokenlake_bench.cache_hit import BUILTIN_SIZE, TRACE_SIZE
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.eviction.stores import StudiedStore, check_capacity
from tokenlake_bench.hits import LongPrompts, long_prompts
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share, output, table, write_json
from tokenlake_bench.sessions import SessionTrace
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.workload import BuiltinWorkload

TRACE_CAPACITIES = (1_000_000, 3_000_000, 10_000_000)
SESSION_CAPACITIES = (500_000, 1_000_000, 3_000_000)
BUILTIN_CAPACITIES = (12_000, 24_000, 48_000)
STUDIED: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {"forecast": Forecast, "lru": LeastRecentlyUsed}
"""The eviction policies by the names that `--policy` takes. Daemons have `forecast`."""
CLAIRVOYANT, INFINITE = "clairvoyant", "infinite"
"""Names of the bounds beside those of the policies: a cache that knows the future, and one that never evicts."""
STEP = 200
"""Number of prompts between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class EvictionArguments:
    """Arguments of the command. `nodes`: prompts that are longer than this part of the capacity are reported apart.
    Raises ConfigurationError for a value out of range."""

    traces: tuple[Path, ...] = ()
    capacity_tokens: str | None = None
    policies: str | None = None
    nodes: int = 1
    limit: int | None = None
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name in self.studied:
            if name not in STUDIED:
                raise ConfigurationError("policy", name, f"names among {', '.join(STUDIED)}, separated by commas")
        if not all(self.capacities or (1,)):
            raise ConfigurationError("capacity_tokens", self.capacity_tokens, "numbers above 0, separated by commas")
        for name in ("nodes", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigurationError(name, value, "at least 1")

    @property
    def studied(self) -> list[str]:
        """Names of the policies."""
        return list(STUDIED) if self.policies is None else self.policies.split(",")

    @property
    def capacities(self) -> tuple[int, ...]:
        """The given capacities, 0 for what is no number; empty where none are given."""
        parts = [] if self.capacity_tokens is None else self.capacity_tokens.split(",")
        return tuple(int(part) if part.isdecimal() else 0 for part in parts)

    def sources(self) -> Iterator[_Source]:
        """The traces of the command line with the capacities to study, or the built-in workload if no trace is
        named."""
        if not self.traces:
            asked = intern_segments(BuiltinWorkload(self.limit, self.seed), BUILTIN_SIZE[1])
            yield _Source("built-in", asked, self.capacities or BUILTIN_CAPACITIES)
        for path in self.traces:
            trace = read_trace(path, limit=self.limit, seed=self.seed)
            usual = SESSION_CAPACITIES if isinstance(trace, SessionTrace) else TRACE_CAPACITIES
            yield _Source(trace.name, trace.accesses(TRACE_SIZE[1]), self.capacities or usual)


class _Source(NamedTuple):
    name: str
    accesses: Accesses
    capacities: tuple[int, ...]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy or bound at one capacity on one trace. `hit_rate`: hit tokens as a share of all prompt
    tokens, those beyond the last full segment included. `of_clairvoyant` divides it by that of the clairvoyant cache;
    None where that is 0. `long_prompts`: the prompts that are longer than the memory of one of the `nodes`, with the
    hits of the one cache studied; None where there are none."""

    trace: str
    capacity_tokens: int
    policy: str
    hit_rate: float
    of_clairvoyant: float | None
    long_prompts: LongPrompts | None = None


@dataclass(kw_only=True)
class StudyResult:
    """The JSON of the command. `complete` is False if the study was interrupted, so that the remaining runs were not
    made."""

    segment_tokens: int
    nodes: int
    seed: int
    complete: bool = False
    cells: list[Cell] = field(default_factory=list)


def run_eviction(arguments: EvictionArguments) -> StudyResult:
    """Run the study, print it, and write the file that the command line names, after every run. KeyboardInterrupt ends
    the study early and keeps the finished runs. Raises TokenLakeError."""
    console = output()
    sources = list(arguments.sources())
    for source in sources:
        for capacity in source.capacities:
            check_capacity(source.accesses, capacity)
    result = StudyResult(segment_tokens=sources[0].accesses.segment_tokens, nodes=arguments.nodes, seed=arguments.seed)
    runs = len(arguments.studied)
    total = sum(len(each.accesses.prompts) * len(each.capacities) * runs for each in sources)
    try:
        with LiveProgress("serving", total) as progress:
            done = 0
            for name, accesses, capacities in sources:
                bounds = bounds_of(accesses)
                for capacity in capacities:
                    found = {
                        CLAIRVOYANT: bounds.hits(capacity // accesses.segment_tokens),
                        INFINITE: bounds.hits(sys.maxsize),
                    }
                    for policy in arguments.studied:
                        store, hits = StudiedStore(accesses, capacity, STUDIED[policy]), found.setdefault(policy, [])
                        for prompt in accesses.prompts:
                            hits.append(store.serve(prompt))
                            done += 1
                            if done % STEP == 0:
                                progress.update(done, f"{name.split('.')[0]}, {policy}")
                    result.cells += _cells(name, accesses, capacity, capacity // arguments.nodes, found)
                    write_json(result, arguments.json_file)
            result.complete = True
    except KeyboardInterrupt:
        console.print("interrupted: the remaining runs of the study were left out")
    write_json(result, arguments.json_file)
    _show(console, result.cells)
    return result


def _cells(
    name: str, accesses: Accesses, capacity: int, node_tokens: int, found: Mapping[str, Sequence[int]]
) -> Iterator[Cell]:
    """The cells of one capacity, from the numbers of segments `found` by policy or bound, and request."""
    segment, tokens = accesses.segment_tokens, max(1, accesses.prompt_tokens)
    best = sum(found[CLAIRVOYANT])
    for policy, hits in found.items():
        served = ((prompt.tokens, each * segment) for prompt, each in zip(accesses.prompts, hits, strict=True))
        yield Cell(
            trace=name,
            capacity_tokens=capacity,
            policy=policy,
            hit_rate=sum(hits) * segment / tokens,
            of_clairvoyant=sum(hits) / best if best else None,
            long_prompts=long_prompts(served, node_tokens),
        )


def mean_share(cells: Sequence[Cell], policy: str) -> float:
    """The geometric mean of the policy's shares of the clairvoyant cache's hits."""
    shares = [cell.of_clairvoyant for cell in cells if cell.policy == policy and cell.of_clairvoyant is not None]
    # It is 0 if one of them is 0, whose logarithm does not exist.
    return math.exp(math.fsum(map(math.log, shares)) / len(shares)) if shares and min(shares) > 0 else 0.0


def _show(console: Console, cells: Sequence[Cell]) -> None:
    """Print a table for each trace: token hit rates, and their share of the clairvoyant cache's."""
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    for trace in dict.fromkeys(cell.trace for cell in cells):
        mine = {(cell.policy, cell.capacity_tokens): cell for cell in cells if cell.trace == trace}
        capacities = list(dict.fromkeys(capacity for _, capacity in mine))
        rows = [[policy, *(_rate(mine[policy, capacity]) for capacity in capacities)] for policy in policies]
        title = f"{trace.split('.')[0]}: token hit %, share of clairvoyant"
        console.print(table(title, ["policy", *(f"{capacity:,}" for capacity in capacities)], rows))
        for capacity in capacities:
            _show_long(console, [mine[policy, capacity] for policy in policies])
    means = [(policy, f"{mean_share(cells, policy):.3f}") for policy in policies]
    console.print(table("share of clairvoyant, mean", (), means))


def _show_long(console: Console, cells: Sequence[Cell]) -> None:
    """Print the hit rates of the prompts that are longer than a node's memory beside those of the others, if any
    are."""
    apart = [(cell.policy, cell.long_prompts) for cell in cells if cell.long_prompts is not None]
    if apart:
        long = apart[0][1]
        title = f"{cells[0].capacity_tokens:,}: {long.prompts:,} prompts are longer than a node's memory"
        rows = [(policy, format_share(each.others_hit_rate), format_share(each.hit_rate)) for policy, each in apart]
        console.print(
            table(f"{title}, {format_share(long.token_share)} of the tokens", ("hits", "others", "these"), rows)
        )


def _rate(cell: Cell) -> str:
    return format_share(cell.hit_rate) + ("" if cell.of_clairvoyant is None else f" {cell.of_clairvoyant:.2f}")
