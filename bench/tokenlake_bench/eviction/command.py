"""The command `bench eviction`: the hits of eviction policies on traces, beside the bounds that no policy exceeds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.console import Console

from tokenlake.errors import ConfigurationError
from tokenlake.hints import Hints, Outlook
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake_bench.baselines import Accesses, Prompt, intern_segments
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.eviction.s3fifo import S3Fifo
from tokenlake_bench.eviction.stores import StudiedStore, check_capacity
from tokenlake_bench.pictures import check_plot, drawn
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import table, write_json
from tokenlake_bench.sessions import SessionTrace
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

TRACE_SEGMENT_TOKENS = 512
BUILTIN_SEGMENT_TOKENS = 64
TRACE_CAPACITIES = (1_000_000, 3_000_000, 10_000_000)
SESSION_CAPACITIES = (500_000, 1_000_000, 3_000_000)
BUILTIN_CAPACITIES = (12_000, 24_000, 48_000)
LRU: Final = "lru"
STUDIED: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "forecast": Forecast,
    LRU: LeastRecentlyUsed,
    "s3fifo": S3Fifo,
}
"""The eviction policies by the names that `--policy` takes. Daemons have `forecast`."""
STEP = 200
"""Number of prompts between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class EvictionArguments:
    """Arguments of the command. Raises ConfigurationError for a value out of range."""

    traces: tuple[Path, ...] = ()
    capacity_tokens: str | None = None
    policies: str | None = None
    hint_accuracy: float | None = None
    limit: int | None = None
    seed: int = 0
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        for name in self.studied:
            if name not in STUDIED:
                raise ConfigurationError("policy", name, f"names among {', '.join(STUDIED)}, separated by commas")
        if self.capacity_tokens is not None:
            _numbers("capacity_tokens", self.capacity_tokens)
        if self.hint_accuracy is not None and not 0 <= self.hint_accuracy <= 1:
            raise ConfigurationError("hint_accuracy", self.hint_accuracy, "0 to 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigurationError("limit", self.limit, "at least 1")
        check_plot(self.plot_file)

    @property
    def studied(self) -> list[str]:
        """Names of the policies."""
        return list(STUDIED) if self.policies is None else self.policies.split(",")

    def sources(self, tell: Callable[[str], object]) -> Iterator[_Source]:
        """The traces of the command line with the capacities to study, or the built-in workload if no trace is named.
        `tell` is called with a text about malformed lines."""
        given = None if self.capacity_tokens is None else _numbers("capacity_tokens", self.capacity_tokens)
        if not self.traces:
            settings = BuiltinSettings(requests=self.limit or BuiltinSettings.requests, seed=self.seed)
            asked = intern_segments(builtin_workload(settings), BUILTIN_SEGMENT_TOKENS)
            yield _Source("built-in", asked, given or BUILTIN_CAPACITIES)
        for path in self.traces:
            trace = read_trace(path, limit=self.limit, seed=self.seed)
            if trace.malformed:
                tell(f"{trace.name}: {len(trace.malformed)} malformed lines skipped")
            usual = SESSION_CAPACITIES if isinstance(trace, SessionTrace) else TRACE_CAPACITIES
            yield _Source(trace.name, trace.accesses(TRACE_SEGMENT_TOKENS), given or usual)


class _Source(NamedTuple):
    name: str
    accesses: Accesses
    capacities: tuple[int, ...]


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Token hit rates that no policy can exceed, for one trace and capacity."""

    trace: str
    capacity_tokens: int
    infinite: float
    clairvoyant: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one policy at one capacity on one trace. `hit_rate`: hit tokens as a share of all prompt tokens, those
    beyond the last full segment included. The `of_*` divide it by that of the clairvoyant cache and of LRU; None where
    that is 0 or was not run."""

    trace: str
    capacity_tokens: int
    policy: str
    hit_rate: float
    of_clairvoyant: float | None = None
    of_lru: float | None = None


class StudyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole study. `means`: by policy, the geometric mean of `of_clairvoyant`. `complete` is
    False if it was interrupted, so that the remaining runs were not made."""

    segment_tokens: int
    hint_accuracy: float | None
    seed: int
    complete: bool
    ceilings: list[Ceiling]
    cells: list[Cell]
    means: dict[str, float]


def run_eviction(arguments: EvictionArguments) -> StudyResult:
    """Run the study, print it, and write the files that the command line names; the JSON is written after every run.
    KeyboardInterrupt ends the study early and keeps the finished runs. Raises TokenLakeError."""
    console = Console()
    sources = list(arguments.sources(console.print))
    for source in sources:
        for capacity in source.capacities:
            check_capacity(source.accesses, capacity)
    ceilings: list[Ceiling] = []
    cells: list[Cell] = []

    def write(*, complete: bool) -> StudyResult:
        result = StudyResult(
            segment_tokens=sources[0].accesses.segment_tokens,
            hint_accuracy=arguments.hint_accuracy,
            seed=arguments.seed,
            complete=complete,
            ceilings=ceilings,
            cells=compared(ceilings, cells),
            means=_means(compared(ceilings, cells)),
        )
        write_json(result, arguments.json_file)
        return result

    complete = True
    runs = len(arguments.studied)
    total = sum(len(each.accesses.prompts) * len(each.capacities) * runs for each in sources)
    try:
        with LiveProgress(console, "serving", total) as progress:
            done = 0
            for name, accesses, capacities in sources:
                bounds = bounds_of(accesses)
                given = hints(accesses.prompts, arguments.hint_accuracy, arguments.seed)
                for capacity in capacities:
                    best = bounds.clairvoyant(capacity // accesses.segment_tokens).rate
                    of = {"trace": name, "capacity_tokens": capacity}
                    ceilings.append(Ceiling(**of, infinite=bounds.infinite().rate, clairvoyant=best))  # type: ignore[arg-type]
                    for policy in arguments.studied:
                        store = StudiedStore(accesses, capacity, STUDIED[policy])
                        hits = 0
                        for index, prompt in enumerate(accesses.prompts):
                            hits += store.serve(prompt, given[index])
                            done += 1
                            if done % STEP == 0:
                                progress.update(done, f"{name.split('.')[0]}, {policy}")
                        rate = hits * accesses.segment_tokens / max(1, accesses.prompt_tokens)
                        cells.append(Cell(**of, policy=policy, hit_rate=rate))  # type: ignore[arg-type]
                        write(complete=False)
    except KeyboardInterrupt:
        complete = False
        console.print("interrupted: the remaining runs of the study were left out")
    result = write(complete=complete)
    _show(console, result)
    if arguments.plot_file is not None and result.cells:
        _plot(result, arguments.plot_file)
    return result


def hints(prompts: Sequence[Prompt], accuracy: float | None, seed: int) -> list[Hints]:
    """The hints of each prompt: the length of the answer where the trace has it, and whether the conversation goes on,
    which is right with probability `accuracy` and drawn by `seed`; with `accuracy` None that part of the hint is
    absent.

    A conversation goes on when a later prompt has its number.
    """
    rng = random.Random(seed)
    last = {prompt.conversation: index for index, prompt in enumerate(prompts)}

    def outlook(index: int, conversation: int) -> Outlook:
        if accuracy is None:
            return Outlook.UNKNOWN
        return Outlook.GOES_ON if (last[conversation] > index) == (rng.random() < accuracy) else Outlook.OVER

    return [
        Hints(outlook(index, prompt.conversation), output_tokens=prompt.output_tokens or -1)
        for index, prompt in enumerate(prompts)
    ]


def compared(ceilings: Sequence[Ceiling], cells: Sequence[Cell]) -> list[Cell]:
    """The results, each compared with the other runs of the study."""
    best = {(each.trace, each.capacity_tokens): each.clairvoyant for each in ceilings}
    known = {(each.trace, each.capacity_tokens, each.policy): each.hit_rate for each in cells}
    return [
        msgspec.structs.replace(
            cell,
            of_clairvoyant=_ratio(cell.hit_rate, best[cell.trace, cell.capacity_tokens]),
            of_lru=_ratio(cell.hit_rate, known.get((cell.trace, cell.capacity_tokens, LRU))),
        )
        for cell in cells
    ]


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _means(cells: Sequence[Cell]) -> dict[str, float]:
    means: dict[str, float] = {}
    for name in dict.fromkeys(cell.policy for cell in cells):
        shares = [cell.of_clairvoyant for cell in cells if cell.policy == name and cell.of_clairvoyant is not None]
        # The geometric mean of hit rates is 0 if one of them is 0, whose logarithm does not exist.
        means[name] = math.exp(math.fsum(map(math.log, shares)) / len(shares)) if shares and min(shares) > 0 else 0.0
    return means


def _show(console: Console, result: StudyResult) -> None:
    """Print a table for each trace: token hit rates, and their share of the clairvoyant cache's."""
    for trace in dict.fromkeys(ceiling.trace for ceiling in result.ceilings):
        ceilings = [ceiling for ceiling in result.ceilings if ceiling.trace == trace]
        mine = [cell for cell in result.cells if cell.trace == trace]
        rates = {(cell.policy, cell.capacity_tokens): cell for cell in mine}
        rows = [
            [name, *(_rate(rates.get((name, each.capacity_tokens))) for each in ceilings)]
            for name in dict.fromkeys(cell.policy for cell in mine)
        ]
        rows.append(["clairvoyant", *(f"{each.clairvoyant:.1%}     " for each in ceilings)])
        rows.append(["infinite", *(f"{each.infinite:.1%}     " for each in ceilings)])
        title = f"{trace.split('.')[0]}: token hit %, share of clairvoyant"
        console.print(table(title, ["policy", *(f"{each.capacity_tokens:,}" for each in ceilings)], rows))
    means = [(name, f"{mean:.3f}") for name, mean in result.means.items()]
    console.print(table("share of clairvoyant, mean", (), means))


def _rate(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return f"{cell.hit_rate:.1%} " + ("    " if cell.of_clairvoyant is None else f"{cell.of_clairvoyant:.2f}")


def _plot(result: StudyResult, path: Path) -> None:
    """Draw hit rates over capacity, with a panel per trace."""
    traces = list(dict.fromkeys(ceiling.trace for ceiling in result.ceilings))
    with drawn(path, (5 * len(traces), 4.2), len(traces)) as (_, panels):
        for panel, trace in zip(panels, traces, strict=True):
            for name in dict.fromkeys(cell.policy for cell in result.cells):
                mine = [cell for cell in result.cells if cell.trace == trace and cell.policy == name]
                sizes = [cell.capacity_tokens / 1e6 for cell in mine]
                panel.plot(sizes, [cell.hit_rate * 100 for cell in mine], "o-", label=name)
            ceilings = [ceiling for ceiling in result.ceilings if ceiling.trace == trace]
            sizes = [ceiling.capacity_tokens / 1e6 for ceiling in ceilings]
            panel.plot(sizes, [ceiling.clairvoyant * 100 for ceiling in ceilings], "k^-", label="clairvoyant")
            panel.axhline(ceilings[0].infinite * 100, color="gray", linestyle=":", label="infinite")
            panel.set_xscale("log")
            panel.set_xlabel("capacity, million tokens")
            panel.set_ylabel("token hit rate, %")
            panel.set_title(trace.split(".")[0], fontsize="medium")
        panels[0].legend(fontsize="small")


def _numbers(field: str, text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if not all(numbers):
        raise ConfigurationError(field, text, "numbers above 0, separated by commas")
    return numbers
