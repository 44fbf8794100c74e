"""Measures an engine's work while it serves: the inputs of the planner (`docs/planner.md`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tokenlake.identity import NodeId
from tokenlake.layout import Layout
from tokenlake.planner import Rates, fetch_limit_s
from tokenlake_client.engines.common.in_flight import LEAST_S, LONGEST_S, NO_WAIT, InFlightWait, wait_for


class Measurements:
    """Adds measured times to `rates`, from which the planner predicts. For one thread."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def in_flight_wait(self, layout: Layout, found: int, count: int) -> InFlightWait:
        """The wait of a match for another engine that computes segments [found, count) of a prompt. `NO_WAIT`:
        this engine should compute them itself.

        Another engine that began earlier has computed the segments by the time this engine would have. It then stores
        them, and this engine reads them. The wait does not pay where storing and reading take longer than computing, or
        where all of it takes longer than the daemon lets a match wait. Without enough measurements there is no wait,
        because a guess may be wrong by a factor of thousands.
        """
        if count <= found or not self.rates.prefill.known:
            return NO_WAIT
        compute_s, hand_over_s = self._predict(layout, found, count)
        if compute_s < LEAST_S or hand_over_s > compute_s or compute_s + hand_over_s > LONGEST_S:
            return NO_WAIT
        return wait_for(compute_s + hand_over_s, sum(self._predict(layout, count - 1, count)))

    def fetch_limit_s(self, layout: Layout, stop: int) -> float:
        """The limit in seconds of the fetches of the first `stop` segments of a prompt, in all; 0: none."""
        return fetch_limit_s(self.rates.prefill, 0, stop * layout.segment_tokens)

    def saved_s(self, tokens: int) -> float:
        """The predicted seconds to compute the first `tokens` tokens of a prompt; 0 while they are not known."""
        return self.rates.prefill.seconds(tokens, 0) if self.rates.prefill.known else 0.0

    def _predict(self, layout: Layout, start: int, stop: int) -> tuple[float, float]:
        """The predicted seconds to compute segments [start, stop) of a prompt, and the predicted seconds to store them
        and to read them at another engine."""
        nbytes = (stop - start) * layout.segment_bytes
        compute_s = self.rates.prefill.seconds((stop - start) * layout.segment_tokens, start * layout.segment_tokens)
        return compute_s, 2 * self.rates.copy.seconds(nbytes) + self.rates.slowest_fetch_s(nbytes)

    @contextmanager
    def prefill(self, new: int, prefix: int, device: Any) -> Iterator[None]:
        """A context manager that measures the seconds of its body, which runs one prefill, and adds them to
        `rates.prefill`. The prefill is one forward pass over `new` tokens of one prompt, behind `prefix` tokens whose
        cache is in the engine. On a GPU `device` the measured time ends when the GPU has finished."""
        began = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self.rates.prefill.add(new, prefix, now - began, now)

    def answered(self, steps: int) -> None:
        """Add the number of decode steps of a finished batch to the measurements."""
        self.rates.answer_tokens.add(steps)

    def decode(self, rows: int, cached: int, steps: int, seconds: float) -> None:
        """Add the measured decode time of a batch: `seconds` for `steps` decode steps. The batch has `rows` sequences,
        whose cache is all in the engine: `cached` tokens per sequence after half of the steps."""
        if steps:
            self.rates.decode.add(rows, cached, seconds / steps, time.perf_counter())

    def copied(self, nbytes: int, seconds: float) -> None:
        """Add the measured time of a load of `nbytes` that lay on this node: the match, and the copy out of the arena,
        took `seconds` together."""
        if nbytes:
            self.rates.copy.add(nbytes, seconds, time.perf_counter())

    def fetched(self, nodes: Sequence[str], segment_bytes: int, seconds: float) -> None:
        """Add the measured time of a fetch, in which no segment was lost: `seconds`. `nodes`: for each segment that lay
        on another node, the node. The nodes send at the same time, so the whole time counts for each of them."""
        now = time.perf_counter()
        for node, count in Counter(nodes).items():
            self.rates.peer(NodeId(node)).fetch.add(count * segment_bytes, seconds, now)

    def opened(self, nodes: Sequence[str], seconds: float) -> None:
        """Add the measured time of the opening of a view: `seconds`. `nodes`: the other nodes that have segments of the
        view."""
        for node in dict.fromkeys(nodes):
            self.rates.peer(NodeId(node)).open_s.add(seconds)

    def queried(self, nodes: Sequence[str], tokens: int, queries: int, nbytes: int, seconds: float) -> None:
        """Add the measured time by which a layer took longer because its queries were sent to other nodes: `seconds`.
        `nodes`: for each segment that was attended to on another node, the node. `tokens`: the number of tokens per
        segment. `queries`: the number of query tokens. `nbytes`: the bytes sent and received. The nodes compute at the
        same time, so the whole time counts for each."""
        now = time.perf_counter()
        shares = Counter(nodes)
        for node, count in shares.items():
            fit = self.rates.peer(NodeId(node)).queries
            fit.add(queries, nbytes // len(shares), count * tokens, seconds, now)
