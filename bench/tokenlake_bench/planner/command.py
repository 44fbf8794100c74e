"""The command `bench planner`: over each link, measures the planner's inputs and then times every way to use a cached
prefix for every batch."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake.identity import NodeId
from tokenlake.planner import Model, Rates
from tokenlake_bench.pictures import check_plot
from tokenlake_bench.planner.judging import Prediction, Result, Row, Totals, predict, result_of, row_of
from tokenlake_bench.planner.measuring import measure
from tokenlake_bench.planner.picture import plot_regions
from tokenlake_bench.planner.rig import OWNER, READER, SEGMENT_TOKENS, PrefixUse, Rig, Timed, Work
from tokenlake_bench.planner.shaping import Shape
from tokenlake_bench.report import format_bytes, write_json

LEARNT = (
    Work(768, 32, 8, 1),
    Work(2560, 96, 8, 1),
    Work(1280, 64, 16, 3),
    Work(2560, 24, 24, 2),
    Work(768, 96, 24, 3),
    Work(3840, 64, 12, 1),
)
"""Batches that are run to measure the planner's inputs. The planner is not judged by any of them."""
LEARNING_TURNS = 2
REMEMBERED = 4 * len(LEARNT)
DOCUMENT = Work(2048, 24, 4, 1)
"""A batch as in the second part of `tokenlake demo`: one request with a question about a long document."""
QUESTIONS = 6
MISSES = 4
"""Maximum number of fetches over a newly shaped link that may miss their deadline before the daemon has measured the
link's speed."""


@dataclass(frozen=True, kw_only=True)
class PlannerArguments:
    """Arguments of the command `bench planner`. Raises ConfigurationError for a value out of range."""

    bandwidths: str
    delays: str
    prefixes: str
    new: str
    decode: str
    sharing: str
    turns: int
    minutes: float = 60.0
    """Time limit of the benchmark, which does not include the measurement of each link's inputs."""
    json_file: Path | None = None
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        if any(length % SEGMENT_TOKENS or length > 4096 for length in _numbers("prefixes", self.prefixes)):
            raise ConfigurationError("prefixes", self.prefixes, "multiples of 256 up to 4096")
        for field in ("bandwidths", "new", "decode", "sharing"):
            _numbers(field, getattr(self, field))
        if min(_numbers("new", self.new)) < 2 or max(_numbers("new", self.new)) >= SEGMENT_TOKENS:
            raise ConfigurationError("new", self.new, "numbers from 2 to 255, less than a segment")
        if self.turns < 1:
            raise ConfigurationError("turns", str(self.turns), "a number above 0")
        self.links()

    def links(self) -> list[Shape]:
        """The links to measure: every bandwidth with every delay of the command line."""
        try:
            delays = [float(part) for part in self.delays.split(",")]
        except ValueError:
            raise ConfigurationError("delays", self.delays, "milliseconds, separated by commas") from None
        rates = _numbers("bandwidths", self.bandwidths)
        return [Shape(rate * 1e6, delay / 1e3) for rate in rates for delay in delays]

    def works(self) -> list[Work]:
        """The batches to measure: every combination of the lengths and row counts of the command line."""
        fields = ("prefixes", "new", "decode", "sharing")
        return [Work(*each) for each in itertools.product(*(_numbers(name, getattr(self, name)) for name in fields))]


def run_planner(arguments: PlannerArguments) -> Result:
    """Run the benchmark, print its tables, and write the files that the command line names. Raises TokenLakeError."""
    check_plot(arguments.plot_file)
    console = Console()
    works = arguments.works()
    lengths = {work.prefix for work in (*works, *LEARNT, DOCUMENT)}
    rows: list[Row] = []
    documents: list[Totals] = []
    coefficients: dict[str, dict[str, list[float]]] = {}
    links = arguments.links()
    with Rig(sorted(lengths)) as rig:
        bench = _Bench(rig)
        bench.learn_here()
        began = time.monotonic()
        for number, link in enumerate(links, 1):
            rates = bench.learn_link(link)
            documents += bench.documents(link, rates)
            until = began + arguments.minutes * 60 * number / len(links)
            # The benchmark measures the batches of requests in random order: at the time limit it leaves out the rest,
            # and the batches that it has measured are then a random sample of all.
            for index, work in enumerate(random.Random(number).sample(works, len(works))):
                if index and time.monotonic() > until:
                    break
                try:
                    judged = bench.judge(link, work, rates, arguments.turns)
                except TokenLakeError as error:
                    console.print(f"{work} left out: {error}", markup=False, highlight=False)
                    continue
                rows += judged
                for row in judged:
                    console.print(_line(row), markup=False, highlight=False)
            coefficients[f"{link.bytes_per_s / 1e6:.0f} MB/s, {link.delay_s * 1e3:g} ms"] = _coefficients(rates)
        result = result_of(rows, documents, coefficients, bench.unequal)
    _show(console, result)
    if arguments.json_file is not None:
        write_json(result, arguments.json_file)
    if arguments.plot_file is not None:
        plot_regions(result.rows, arguments.plot_file)
    return result


class _Bench:
    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._model = Model.of(rig.layout, rig.attention)
        self._local_samples: deque[Timed] = deque(maxlen=REMEMBERED)
        """The newest measured runs that read the prefix at this node or recomputed it, whose time does not depend on a
        link."""
        self.unequal = 0
        """Number of repetitions in which the ways to use the prefix did not all give the same tokens."""

    def learn_here(self) -> None:
        """Measure the planner's inputs that do not depend on a link: local reads, prefills and decode steps."""
        # The times of the first runs are not used, because these also set up torch and the connections.
        self._turn(LEARNT[0], (PrefixUse.LOCAL, PrefixUse.RECOMPUTE))
        for work in LEARNT * LEARNING_TURNS:
            self._local_samples += self._turn(work, (PrefixUse.LOCAL, PrefixUse.RECOMPUTE)).values()

    def learn_link(self, link: Shape) -> Rates:
        """Give all links the bandwidth and delay of `link`, and return all inputs of the planner as measured over
        it."""
        self._rig.shape(link)
        for _ in range(MISSES):
            if self._turn(DOCUMENT, (PrefixUse.FETCH,))[PrefixUse.FETCH].served:
                break
        timed: list[Timed] = []
        for work in LEARNT * LEARNING_TURNS:
            timed += self._turn(work, (PrefixUse.FETCH, PrefixUse.SHIP)).values()
        rates = Rates()
        measure(rates, self._model, [*self._local_samples, *timed])
        return rates

    def judge(self, link: Shape, work: Work, rates: Rates, turns: int) -> list[Row]:
        """Measure one batch over the link and return two rows of the result: for its prefix at the other node, and at
        this node. The planner chooses by `rates` before the times of this batch are added to them, as in an engine."""
        predictions = [predict(work, self._rig.keys(work), at, self._model, rates) for at in (OWNER, READER)]
        timed: list[Timed] = []
        for turn in range(turns):
            # The order of the ways rotates over the repetitions, because the first one finds other contents in the
            # processor's caches.
            uses = list(PrefixUse)[turn % 4 :] + list(PrefixUse)[: turn % 4]
            taken = self._turn(work, uses)
            self.unequal += len({one.tokens for one in taken.values()}) > 1
            timed += taken.values()
        seconds = {use: [one.seconds for one in timed if one.use is use] for use in PrefixUse}
        self._local_samples += [one for one in timed if one.use in (PrefixUse.LOCAL, PrefixUse.RECOMPUTE)]
        measure(rates, self._model, timed)
        rows = []
        for prediction in predictions:
            ways = [PrefixUse(way) for way in prediction.seconds]
            unserved = sum(not one.served for one in timed if one.use in ways)
            rows.append(row_of((link.bytes_per_s, link.delay_s), work, prediction, seconds, unserved))
        return rows

    def documents(self, link: Shape, rates: Rates) -> Iterator[Totals]:
        """Serve questions about the demo's document and yield the totals of three strategies: always fetching, always
        shipping queries, the planner's choice."""
        prediction: Prediction = predict(DOCUMENT, self._rig.keys(DOCUMENT), OWNER, self._model, rates)
        taken: dict[PrefixUse, list[Timed]] = {}
        for _ in range(QUESTIONS):
            for use, one in self._turn(DOCUMENT, {PrefixUse.FETCH, PrefixUse.SHIP, prediction.chosen}).items():
                taken.setdefault(use, []).append(one)
        for name, use in (
            ("fetch only", PrefixUse.FETCH),
            ("ship only", PrefixUse.SHIP),
            ("planner", prediction.chosen),
        ):
            yield Totals(
                megabytes_per_s=link.bytes_per_s / 1e6,
                delay_ms=link.delay_s * 1e3,
                way=name,
                moved_bytes=sum(one.moved_bytes for one in taken[use]),
                ttft_ms=statistics.median(one.ttft_s for one in taken[use]) * 1e3,
                ways={use.value: QUESTIONS},
            )

    def _turn(self, work: Work, uses: Sequence[PrefixUse] | set[PrefixUse]) -> dict[PrefixUse, Timed]:
        suffixes = [self._rig.draw(work.new) for _ in range(work.sharing)]
        ordered = sorted(uses, key=lambda use: use.value) if isinstance(uses, set) else uses
        return {use: self._rig.run(use, work, suffixes) for use in ordered}


def _numbers(field: str, text: str) -> list[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(numbers):
        raise ConfigurationError(field, text, "numbers above 0, separated by commas")
    return numbers


def _coefficients(rates: Rates) -> dict[str, list[float]]:
    peer = rates.peer(NodeId(OWNER))
    fits = {"copy": rates.copy, "prefill": rates.prefill, "decode": rates.decode}
    fits |= {"fetch": peer.fetch, "queries": peer.queries}
    return {name: list(fit.coefficients) for name, fit in fits.items()} | {"open_s": [peer.open_s.value]}


def _line(row: Row) -> str:
    times = ", ".join(
        f"{way} {taken:.0f} ({row.predicted_ms[way]:.0f})" for way, taken in sorted(row.measured_ms.items())
    )
    link = f"{row.megabytes_per_s:.0f} MB/s {row.delay_ms:g} ms"
    work = f"{row.prefix} + {row.new}, {row.decode} steps, {row.sharing} share"
    place = "here" if row.here else "there"
    return f"{link}, {work}, {place}: {times} ms; {row.chosen}, regret {row.regret:.0%}"


def _show(console: Console, result: Result) -> None:
    there = [row for row in result.rows if not row.here]
    table = Table(title="regret of the planner's choice", title_justify="left")
    for title in ("link", "rows", "best: fetch", "ship", "recompute", "mean", "worst"):
        table.add_column(title, justify="left" if title == "link" else "right")
    for link, grouped in itertools.groupby(there, key=lambda row: (row.megabytes_per_s, row.delay_ms)):
        rows = list(grouped)
        counts = [
            str(sum(row.best == way.value for row in rows))
            for way in (PrefixUse.FETCH, PrefixUse.SHIP, PrefixUse.RECOMPUTE)
        ]
        mean, worst = statistics.mean(row.regret for row in rows), max(row.regret for row in rows)
        name = f"{link[0]:.0f} MB/s, {link[1]:g} ms"
        table.add_row(name, str(len(rows)), *counts, f"{mean:.1%}", f"{worst:.0%}")
    console.print(table)
    console.print(
        f"regret with the prefix at another node: mean {result.planner_mean_regret:.1%}, worst "
        f"{result.planner_max_regret:.0%}; at this node: mean {result.here_mean_regret:.1%}, worst "
        f"{result.here_max_regret:.0%}; by the predicted times at most {result.model_regret:.2%}\n"
        f"rows whose chosen way took at most 1.05 x the time to recompute + 50 ms: {result.promise_rows} of "
        f"{len(result.rows)}; turns with unequal tokens: {result.unequal_turns}",
        highlight=False,
    )
    shown = Table("link", "way", "bytes moved", "TTFT, median", title="the demo's documents", title_justify="left")
    for each in result.documents:
        way = each.way if each.way != "planner" else f"planner: {', '.join(each.ways)}"
        link_name = f"{each.megabytes_per_s:.0f} MB/s, {each.delay_ms:g} ms"
        shown.add_row(link_name, way, format_bytes(each.moved_bytes), f"{each.ttft_ms:.0f} ms")
    console.print(shown)
