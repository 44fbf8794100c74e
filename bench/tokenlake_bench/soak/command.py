"""The command `bench soak`: runs load and faults for a time, then checks the final state, then reports which claims
hold."""

from __future__ import annotations

import heapq
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console, Group

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.daemons import EVICTED, settle
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, output, table, verdict, write_json
from tokenlake_bench.soak.faults import schedule
from tokenlake_bench.soak.fleet import Fleet
from tokenlake_bench.soak.gauges import DAEMON, ENGINE, Gauge, compared

SAMPLES: Final = 240
"""Maximum number of times that gauges are sampled in a run; short runs take a sample per second."""
DRAIN_S: Final = 60.0
"""Seconds within which all leases and reservations must have ended after the load: the duration of a lease and of a
reservation, and time for delays of a busy machine."""
POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class SoakArguments:
    """Arguments of the command `bench soak`. Raises ConfigurationError for a value out of range."""

    minutes: float = 2.0
    seed: int = 0
    nodes: int = 3
    rate: float = 10.0
    fault_every: float = 4.0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("minutes", "rate", "fault_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(name.replace("_", "-"), getattr(self, name), "a finite number above 0")
        if self.nodes < 2:
            raise ConfigurationError("nodes", self.nodes, "at least 2, so that one can be killed")

    @property
    def seconds(self) -> float:
        """Seconds for which the load runs."""
        return self.minutes * 60


class Claim(msgspec.Struct, frozen=True):
    """One claim about a soak. `holds`: None where the run was too short to decide; the soak has then not passed."""

    text: str
    found: str
    holds: bool | None


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench soak`. `gauges`: of the processes that lived as long as the run."""

    seconds: float
    seed: int
    nodes: int
    interrupted: bool
    claims: list[Claim]
    gauges: list[Gauge]
    faults: dict[str, int]
    done: dict[str, int]

    @property
    def passed(self) -> bool:
        """True if every claim about the soak holds."""
        return all(claim.holds for claim in self.claims)


def run_soak(arguments: SoakArguments, console: Console | None = None) -> SoakResult:
    """Run the soak, print its result, and write the file that the command line names. An interruption (SIGINT, also
    where it was ignored, as in a shell's background jobs) ends the load early. Raises TokenLakeError."""
    console = console or output()
    console.print(
        f"tokenlake bench soak --minutes {arguments.minutes:g} --seed {arguments.seed} --nodes {arguments.nodes} "
        f"--rate {arguments.rate:g} --fault-every {arguments.fault_every:g}",
        soft_wrap=True,
    )
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Fleet(arguments.nodes, arguments.seed, arguments.rate) as fleet:
            run = _Run(arguments, fleet, console)
            try:
                run.load()
            except KeyboardInterrupt:
                run.interrupted = True
            run.afterwards()
            result = run.result()
    finally:
        signal.signal(signal.SIGINT, handler)
    console.print(tables(result))
    write_json(result, arguments.json_file)
    return result


@dataclass
class _Run:
    """One run of the soak."""

    arguments: SoakArguments
    fleet: Fleet
    console: Console
    interrupted: bool = False
    load_s: float = 0.0
    claims: list[Claim] = field(default_factory=list)

    def load(self) -> None:
        """Run load and faults, and sample the gauges at regular times."""
        seconds, fleet = self.arguments.seconds, self.fleet
        order = count()
        events: list[tuple[float, int, Callable[[], None]]] = []
        for fault in schedule(fleet.targets(), seconds, self.arguments.fault_every, self.arguments.seed):
            events.append((fault.at_s, next(order), partial(fleet.begin, fault)))
            events.append((fault.at_s + fault.for_s, next(order), partial(fleet.end, fault)))
        every_s = max(1.0, seconds / SAMPLES)
        events += [(number * every_s, next(order), self._sample) for number in range(1, int(seconds / every_s) + 1)]
        heapq.heapify(events)
        fleet.wait_started()
        self._began = time.monotonic()
        with LiveProgress("soak, seconds", max(1, int(seconds))) as progress:
            while events and (now := self._now()) < seconds:
                if events[0][0] > now:
                    time.sleep(min(POLL_S, events[0][0] - now))
                    continue
                heapq.heappop(events)[2]()
                progress.update(int(self._now()), f"{sum(fleet.faults.values())} faults")

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _sample(self) -> None:
        self.load_s = self._now()
        self.fleet.tend()
        self.fleet.sample(self.load_s)

    def _claim(self, text: str, found: str, holds: bool | None) -> None:
        self.claims.append(Claim(text, found, holds))

    def afterwards(self) -> None:
        """Check, after the load, that all leased and reserved slots are given back and that every slot takes a new
        segment."""
        fleet = self.fleet
        fleet.recover()
        gave_back = fleet.drain(DRAIN_S)
        self.console.print("the load has ended: waiting until all leases and reservations have ended")
        left = _wait_for_none(fleet.held)
        evicted = int(fleet.cluster.totals()[EVICTED])
        fleet.leave()
        done = fleet.done()
        compared, nbytes = done["segments compared"], done["wrong bytes"]
        moved = f"{done['segments from other nodes']:,} came from other nodes, {evicted:,} evicted"
        stirred = min(done["segments from other nodes"], evicted, sum(fleet.faults.values()))
        self._claim("the load used every mechanism", f"{compared:,} segments compared, {moved}", stirred > 0)
        self._claim("wrong bytes: 0", f"{nbytes:,} of {compared:,} segments", compared > 0 and not nbytes)
        ended, failures = fleet.ended, fleet.failures()
        self._claim("no process ended unless it was killed", f"{len(ended)} {'; '.join(ended[:2])}", not ended)
        self._claim("no failure in a daemon's log", "; ".join(failures[:3]) or "none", not failures)
        self._claim(
            "quarantine drains to 0 while the engines are still connected", f"{left:.0f} holds", gave_back and not left
        )
        processes = _wait_for_none(lambda: fleet.cluster.totals()["tokenlake_processes"])
        self._claim("the daemons forget processes that left", f"{processes:.0f} processes", not processes)
        settle(fleet.cluster)
        missing = fleet.slots_missing()
        self._claim("free slots and segments add up to all slots", f"{missing:.0f} missing", not missing)
        self.console.print("storing as many segments as the first daemon has slots")
        text = "every slot of the first daemon takes another segment"
        try:
            refused, stayed = fleet.displace()
            self._claim(text, f"{refused} refused, {stayed} segments stayed", not refused and not stayed)
        except TokenLakeError as error:
            self._claim(text, str(error), False)

    def result(self) -> SoakResult:
        """The result of the run."""
        fleet = self.fleet
        gauges: list[Gauge] = []
        claims = list(self.claims)
        for gauge in DAEMON:
            found = [
                compared(name, gauge, fleet.samples[name][gauge], tolerances[gauge])
                for name in fleet.survivors()
                if gauge in (tolerances := DAEMON if name.startswith("node") else ENGINE)
            ]
            known = [each for each in found if each is not None]
            gauges += known
            claims.append(flat_claim(gauge, known if len(known) == len(found) else []))
        return SoakResult(
            seconds=self.load_s,
            seed=self.arguments.seed,
            nodes=self.arguments.nodes,
            interrupted=self.interrupted,
            claims=claims,
            gauges=gauges,
            faults=dict(sorted(fleet.faults.items())),
            done=dict(sorted(fleet.done().items())),
        )


def flat_claim(gauge: str, found: list[Gauge]) -> Claim:
    """That a gauge grows in no process; undecided where nothing was found."""
    if not found:
        return Claim(f"{gauge} flat", "too few samples", None)
    worst = max(found, key=lambda each: (each.later - each.earlier) / each.allowed)
    earlier, later, allowed = (_value(gauge, value) for value in (worst.earlier, worst.later, worst.allowed))
    text = f"most in {worst.process}: {earlier} -> {later}, {allowed} more allowed"
    return Claim(f"{gauge} flat", text, all(each.flat for each in found))


def _wait_for_none(look: Callable[[], float]) -> float:
    """Call `look` repeatedly until it returns 0, for at most `DRAIN_S` seconds. Returns the last value."""
    until = time.monotonic() + DRAIN_S
    while (found := look()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def _value(gauge: str, value: float) -> str:
    return format_bytes(value) if gauge == "memory" else f"{value:,.0f}"


def tables(result: SoakResult) -> Group:
    """A line for each claim, what was done, and a line per gauge of each process that lived as long as the run."""
    words = {True: "holds", False: "FAILS", None: "UNDECIDED"}
    cut = ", interrupted" if result.interrupted else ""
    return Group(
        table(
            f"soak of {format_duration(result.seconds)}{cut}: {'passed' if result.passed else 'FAILED'}",
            ("claim", "verdict", "found"),
            [(each.text, verdict(words[each.holds], good=bool(each.holds)), each.found) for each in result.claims],
        ),
        table("done", (), [(name, f"{number:,}") for name, number in {**result.faults, **result.done}.items()]),
        table(
            "medians after warm-up; detects: growth per hour",
            ("process", "gauge", "earlier", "later", "allowed", "detects"),
            [
                (
                    each.process,
                    each.gauge,
                    *(
                        _value(each.gauge, value)
                        for value in (each.earlier, each.later, each.allowed, each.least_per_hour)
                    ),
                )
                for each in result.gauges
            ],
        ),
    )
