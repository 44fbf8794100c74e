"""The command `bench soak`: runs load and faults for a time, then checks the final state, then reports which claims
hold."""

from __future__ import annotations

import heapq
import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from rich.console import Console

from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake_bench.daemons import settle
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import write_json
from tokenlake_bench.soak.faults import schedule
from tokenlake_bench.soak.fleet import EVICTED, Fleet
from tokenlake_bench.soak.refill import Refilled, displace, refill
from tokenlake_bench.soak.results import Claim, SoakResult, flat_claims, gauges_of, tables

SAMPLES: Final = 240
"""Maximum number of times that gauges are sampled in a run; short runs take a sample per second."""
DRAIN_S: Final = 60.0
"""Seconds within which all leases and reservations must have ended after the load: the duration of a lease and of a
reservation, and time for delays of a busy machine."""
LOG_CHARACTERS: Final = 4000
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

    def command(self) -> str:
        """Text of the command line that repeats this run."""
        return (
            f"tokenlake bench soak --minutes {self.minutes:g} --seed {self.seed} --nodes {self.nodes} "
            f"--rate {self.rate:g} --fault-every {self.fault_every:g}"
        )


def run_soak(arguments: SoakArguments, console: Console | None = None) -> SoakResult:
    """Run the soak, print its result, and write the files that the command line names. A first interruption ends the
    load early, a second one the checks after the load. Raises TokenLakeError."""
    console = console or Console()
    console.print(arguments.command(), soft_wrap=True)
    with (
        tempfile.TemporaryDirectory(prefix="tokenlake-soak-") as directory,
        Fleet(arguments.nodes, arguments.seed, arguments.rate, Path(directory)) as fleet,
    ):
        run = _Run(arguments, fleet, console)
        with _interruptible(run):
            run.load()
        with _interruptible(run):
            run.afterwards()
        result = run.result()
    console.print(tables(result))
    for name, log in result.logs.items():
        console.print(f"the end of {name}'s log:\n{log}", markup=False, soft_wrap=True)
    write_json(result, arguments.json_file)
    return result


@contextmanager
def _interruptible(run: _Run) -> Iterator[None]:
    """Context that SIGTERM and SIGINT end: `run.interrupted` is set then, and the code behind the context goes on.
    SIGINT does so also where it was ignored, as in a shell's background jobs. The former handlers are set again."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Run:
    """One run of the soak. Results of a check are None until the check was made."""

    arguments: SoakArguments
    fleet: Fleet
    console: Console
    interrupted: bool = False
    load_s: float = 0.0
    engines_gave_back: bool = False
    left_held: dict[str, float] | None = None
    left_processes: float | None = None
    slots_missing: float | None = None
    refilled: Refilled | None = None
    stayed: int | None = None
    trouble: list[str] = field(default_factory=list)

    def load(self) -> None:
        """Run load and faults, and sample the gauges of all processes at regular times."""
        seconds = self.arguments.seconds
        order = count()
        events: list[tuple[float, int, Callable[[], None]]] = []
        for fault in schedule(self.fleet.targets(), seconds, self.arguments.fault_every, self.arguments.seed):
            events.append((fault.at_s, next(order), lambda fault=fault: self.fleet.begin(fault)))  # type: ignore[misc]
            events.append((fault.at_s + fault.for_s, next(order), lambda fault=fault: self.fleet.end(fault)))  # type: ignore[misc]
        every_s = max(1.0, seconds / SAMPLES)
        events += [(number * every_s, next(order), self._sample) for number in range(1, int(seconds / every_s) + 1)]
        heapq.heapify(events)
        self._began = time.monotonic()
        with LiveProgress(self.console, "soak, seconds", max(1, int(seconds))) as progress:
            while events and (now := self._now()) < seconds:
                if events[0][0] > now:
                    time.sleep(min(POLL_S, events[0][0] - now))
                    continue
                heapq.heappop(events)[2]()
                progress.update(int(self._now()), self._status())
            self.load_s = self._now()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _sample(self) -> None:
        self.load_s = self._now()
        self.fleet.tend()
        self.fleet.sample(self.load_s)

    def _status(self) -> str:
        done, faults = self.fleet.done(), sum(self.fleet.faults.values())
        return (
            f"{done['segments compared']:,} segments compared, {self.fleet.wrong()[1]:,} wrong bytes, {faults} faults, "
            f"{self.fleet.counted(EVICTED):,} evicted"
        )

    def afterwards(self) -> None:
        """Check, after the load, that all leased and reserved slots are given back and that every slot takes a new
        segment."""
        fleet = self.fleet
        fleet.recover()
        self.engines_gave_back = fleet.drain(DRAIN_S)
        self.console.print("the load has ended: waiting until all leases and reservations have ended")
        self.left_held = _wait_for_none(fleet.held)
        fleet.leave()
        self.left_processes = _wait_for_none(lambda: {"processes": fleet.cluster.totals()["tokenlake_processes"]})[
            "processes"
        ]
        settle(fleet.cluster)
        self.slots_missing = fleet.slots_missing()
        self.console.print("storing as many segments as there are slots")
        try:
            self.refilled = refill(fleet.cluster, self.arguments.seed)
            fleet.stop_others()
            self.stayed = displace(fleet.cluster.nodes[0], self.arguments.seed)
        except TokenLakeError as error:
            self.trouble.append(f"refill: {error}")

    def result(self) -> SoakResult:
        """The result of the run, from what is measured and checked so far."""
        fleet = self.fleet
        survivors = [target.name for target in fleet.targets() if not target.mortal]
        gauges, unknown = gauges_of(fleet.recorder, survivors)
        claims = [*self._claims(), *flat_claims(gauges, unknown)]
        failed = any(claim.holds is False for claim in claims)
        return SoakResult(
            seconds=self.load_s,
            seed=self.arguments.seed,
            nodes=self.arguments.nodes,
            interrupted=self.interrupted,
            claims=claims,
            gauges=gauges,
            faults=dict(sorted(fleet.faults.items())),
            done=dict(sorted((fleet.done() + Counter({"segments evicted": fleet.counted(EVICTED)})).items())),
            lives={name: len(lives) for name, lives in fleet.recorder.lives.items()},
            logs={name: log[-LOG_CHARACTERS:] for name, log in fleet.logs().items()} if failed else {},
        )

    def _claims(self) -> list[Claim]:
        fleet, done = self.fleet, self.fleet.done()
        segments, nbytes = fleet.wrong()
        compared = done["segments compared"]
        again = self.refilled
        if again is not None:
            nbytes += again.wrong_bytes
        ended, failures = fleet.ended(), fleet.failures()
        held = self.left_held
        stirred = min(done["segments from other nodes"], fleet.counted(EVICTED), sum(fleet.faults.values()))
        moved = f"{done['segments from other nodes']:,} came from other nodes, {fleet.counted(EVICTED):,} evicted"
        left = {} if held is None else {"slots": held["quarantined"], "leases and other holds": held["holds"]}
        return [
            Claim(
                "the load used every mechanism",
                f"{compared:,} segments compared, {moved}; {_counts(fleet.faults)}",
                stirred > 0,
            ),
            Claim("wrong bytes: 0", f"{nbytes:,} of {compared:,} segments", compared > 0 and nbytes == segments == 0),
            Claim(
                "no process ended unless it was killed",
                f"{len(ended)}; {'; '.join([*ended[:2], *self.trouble])}".removesuffix("; "),
                not ended and not self.trouble,
            ),
            Claim("no failure in a daemon's log", "; ".join(failures[:3]) or "none", not failures),
            Claim(
                "quarantine drains to 0 while the engines are still connected",
                ", ".join(f"{count:.0f} {name}" for name, count in left.items()) or "not reached",
                held is not None and self.engines_gave_back and not any(held.values()),
            ),
            _claim_of_zero("the daemons forget processes that left", self.left_processes, "processes"),
            _claim_of_zero("free slots and segments add up to all slots", self.slots_missing, "missing"),
            Claim(
                "as many segments as slots can be stored again",
                "not reached" if again is None else f"{again.stored:,} of {again.asked:,} read back {again.stuck}",
                again is not None and again.stored == again.asked,
            ),
            _claim_of_zero("every slot of the first daemon takes another segment", self.stayed, "segments stayed"),
        ]


def _claim_of_zero(text: str, count: float | None, what: str) -> Claim:
    return Claim(text, "not reached" if count is None else f"{count:.0f} {what}", count == 0)


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counted.items())) or "no faults"


def _wait_for_none(look: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Call `look` repeatedly until all values that it returns are 0, for at most `DRAIN_S` seconds. Returns the last
    values."""
    until = time.monotonic() + DRAIN_S
    while any((found := look()).values()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found
