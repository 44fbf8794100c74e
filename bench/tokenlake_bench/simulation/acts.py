"""Acts of a router that knows which prompts go on: hints that the requests of a simulated workload carry."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from tokenlake.hints import DEMOTE, RETAIN, Hints, Outlook
from tokenlake_bench.simulation.arrivals import Arrival

ACTS = MappingProxyType(
    {
        "outlook": (Hints(Outlook.GOES_ON), Hints(Outlook.OVER)),
        "retain": (RETAIN, None),
        "demote": (None, DEMOTE),
        "both": (RETAIN, DEMOTE),
    }
)
"""By name, the hints of a request whose prompt goes on, and of one whose prompt does not."""


def with_acts(arrivals: Sequence[Arrival], name: str, right: float, seed: int) -> Iterator[Arrival]:
    """The requests with the hints of `ACTS[name]`. A prompt goes on if a later request has its last full segment.
    `right`: the share of the requests of which the router knows this; of the others, drawn by `seed`, it says the
    opposite."""
    draw = random.Random(seed)
    last = {segment: number for number, arrival in enumerate(arrivals) for segment in arrival.chain.tolist()}
    goes_on, over = ACTS[name]
    for number, arrival in enumerate(arrivals):
        again = len(arrival.chain) > 0 and last[int(arrival.chain[-1])] > number
        yield arrival._replace(hints=goes_on if again == (draw.random() < right) else over)
