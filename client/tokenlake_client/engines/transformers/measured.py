"""What an engine measures while it serves, for the planner (`docs/planner.md`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tokenlake.identity import NodeId
from tokenlake.planner import Rates

__all__ = ["Measured"]


class Measured:
    """Adds to `rates` what took how long. For one thread."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

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
