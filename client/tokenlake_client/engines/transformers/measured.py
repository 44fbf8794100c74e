"""What an engine measures while it serves, for the planner (`docs/planner.md`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tokenlake.identity import NodeId
from tokenlake.layout import Layout
from tokenlake.planner import Rates

__all__ = ["IMPATIENT", "LATE", "LEAST_S", "LONGEST_S", "Measured", "Patience"]

LEAST_S = 0.02
"""What is computed faster is not waited for: asking for it takes a part of that."""
LONGEST_S = 10.0
"""The pool lets nobody wait longer."""
LATE = 1.5
"""Times the prediction: who computes may be slower than this engine, and is to be waited for all the same."""


class Patience(NamedTuple):
    """How long a match may wait for whoever computes what it misses."""

    in_flight_wait_s: float
    segment_s: float
    """Of it, for each segment that is missing."""

    def seconds(self, missing: int) -> float:
        """For so many."""
        return min(self.in_flight_wait_s, missing * self.segment_s)


IMPATIENT = Patience(0.0, 0.0)


class Measured:
    """Adds to `rates` what took how long. For one thread."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def patience(self, layout: Layout, found: int, wanted: int) -> Patience:
        """How long to wait for whoever computes segments [found, wanted) of a prompt, or those of them that turn out to
        be missing. `IMPATIENT`: compute them.

        Who began before this engine asked will have computed them when this engine would have, then stores them, and
        this engine reads them. Not where storing and reading take longer than computing, nor where the pool lets nobody
        wait for so long, nor until enough was measured: a guess is wrong by a factor of thousands on some machine.
        """
        if wanted <= found or not self.rates.prefill.known:
            return IMPATIENT
        compute_s, pass_on_s = self._takes(layout, found, wanted)
        if compute_s < LEAST_S or pass_on_s > compute_s or compute_s + pass_on_s > LONGEST_S:
            return IMPATIENT
        # The last one is computed behind all others.
        each_s = sum(self._takes(layout, wanted - 1, wanted))
        return Patience(min(LATE * (compute_s + pass_on_s), LONGEST_S), LATE * each_s)

    def _takes(self, layout: Layout, start: int, stop: int) -> tuple[float, float]:
        """Computing segments [start, stop) of a prompt, and then storing them and reading them elsewhere."""
        nbytes = (stop - start) * layout.segment_bytes
        compute_s = self.rates.prefill.seconds((stop - start) * layout.segment_tokens, start * layout.segment_tokens)
        return compute_s, 2 * self.rates.copy.seconds(nbytes) + self.rates.slowest_fetch_s(nbytes)

    @contextmanager
    def prefill(self, new: int, prefix: int, device: Any) -> Iterator[None]:
        """Around a forward pass of one row, all of whose cache is the engine's."""
        began = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self.rates.prefill.add(new, prefix, now - began, now)

    def answered(self, steps: int) -> None:
        """After a batch, of so many decode steps."""
        self.rates.answer_tokens.add(steps, time.perf_counter())

    def decode(self, rows: int, cached: int, steps: int, seconds: float) -> None:
        """After so many steps of a batch, all of whose cache is the engine's; `cached`: tokens of a row, halfway."""
        if steps:
            self.rates.decode.add(rows, cached, seconds / steps, time.perf_counter())

    def copy(self, nbytes: int, seconds: float) -> None:
        """After a prompt was matched, and its prefix, all of it on this node, copied out of the arena."""
        if nbytes:
            self.rates.copy.add(nbytes, seconds, time.perf_counter())

    def fetched(self, nodes: Sequence[str], segment_bytes: int, seconds: float) -> None:
        """After segments came that lay on these other nodes, one each: all that were asked for. Several nodes send at
        once: each is said to have taken all of the time."""
        now = time.perf_counter()
        for node, count in Counter(nodes).items():
            self.rates.peer(NodeId(node)).fetch.add(count * segment_bytes, seconds, now)

    def opened(self, nodes: Sequence[str], seconds: float) -> None:
        """After a view was opened of segments on these other nodes."""
        for node in dict.fromkeys(nodes):
            self.rates.peer(NodeId(node)).open_s.add(seconds, time.perf_counter())

    def queried(self, nodes: Sequence[str], tokens: int, queries: int, nbytes: int, seconds: float) -> None:
        """After one layer, that took `seconds` longer because its queries went to segments of `tokens` tokens on these
        other nodes, one each. Several nodes are asked at once, as with `fetch`."""
        now = time.perf_counter()
        shares = Counter(nodes)
        for node, count in shares.items():
            fit = self.rates.peer(NodeId(node)).queries
            fit.add(queries, nbytes // len(shares), count * tokens, seconds, now)
