"""The schedule of kills and stops of processes in a soak, which is drawn from a seed before the run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

FIRST_S: Final = 5.0
"""Seconds at the beginning of a run without faults, in which the processes start and fill the memory."""
QUIET_S: Final = 5.0
"""Seconds at the end of the load before which every fault has ended."""
REST_S: Final = 10.0
"""Minimum number of seconds between two faults of one process."""
SHORTEST_S: Final = 0.05
LONGEST_S: Final = 6.0
"""Longest fault in seconds: three times `lease_s` of the soak's daemons, so that the sessions of some stopped engines
have expired when the engines continue."""


class FaultKind(StrEnum):
    """The kind of a fault: its process is killed, or stopped for a time."""

    KILL = "kill -9"
    STOP = "SIGSTOP"


@dataclass(frozen=True, slots=True)
class Target:
    """A process that may have faults, by name. A process that is not `mortal` is stopped but never killed: it lives as
    long as the run, so that a leak in it shows."""

    name: str
    mortal: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault of one process. `for_s`: seconds until the process is started again or continued."""

    at_s: float
    target: str
    kind: FaultKind
    for_s: float


def schedule(targets: Sequence[Target], seconds: float, every_s: float, seed: int) -> list[Fault]:
    """The planned faults in order of time, one every `every_s` seconds on average; faults of different processes may
    overlap. Durations are drawn uniformly on a logarithmic scale."""
    draw = random.Random(f"faults {seed}")
    faults: list[Fault] = []
    free_from = dict.fromkeys((target.name for target in targets), FIRST_S)
    at_s = FIRST_S
    while True:
        at_s += draw.expovariate(1 / every_s)
        for_s = math.exp(draw.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))
        target = draw.choice(targets)
        kind = draw.choice(tuple(FaultKind)) if target.mortal else FaultKind.STOP
        if at_s + LONGEST_S + QUIET_S > seconds:
            return faults
        if at_s >= free_from[target.name]:
            faults.append(Fault(at_s, target.name, kind, for_s))
            free_from[target.name] = at_s + for_s + REST_S
