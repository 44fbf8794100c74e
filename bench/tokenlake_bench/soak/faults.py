"""Which process is killed or stopped when: drawn from a seed before anything runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Fault", "FaultKind", "Target", "schedule"]

FIRST_S: Final = 5.0
"""Nothing happens before: processes start and fill the memory."""
QUIET_S: Final = 5.0
"""Nor at the end: what was stopped or killed is back by then."""
REST_S: Final = 10.0
"""Between two faults of one process, so that it is back at work before the next."""
SHORTEST_S: Final = 0.05
LONGEST_S: Final = 6.0
"""Three times the lease of the daemons here, so that some of those that were stopped wake up to an expired session."""


class FaultKind(StrEnum):
    """What is done to a process."""

    KILL = "kill -9"
    STOP = "SIGSTOP"


@dataclass(frozen=True, slots=True)
class Target:
    """A process, by its place. One that is not `mortal` is only stopped: it lives as long as the run, so that whatever
    grows in it shows."""

    name: str
    mortal: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """`for_s`: until it is started again or continued."""

    at_s: float
    target: str
    kind: FaultKind
    for_s: float


def schedule(targets: Sequence[Target], seconds: float, every_s: float, seed: int) -> list[Fault]:
    """In order of time, one every `every_s` seconds on average; those of different processes may overlap. Lengths are
    drawn evenly on a logarithmic scale."""
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
