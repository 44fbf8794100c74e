"""The requests of `bench restart` and `bench cold`: conversations that go on over all restarts."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Final

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake_bench.load import Asked
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_bench.workload import BuiltinWorkload
from tokenlake_client import Pool

CONVERSATIONS: Final = 16
"""Conversations that are open at a time, per node."""
REQUESTS: Final = 20_000
"""Requests of the workload, after which it begins anew."""
RECENT: Final = 50
"""While nothing is stored, requests are repeated of so many last ones."""


@dataclass
class Conversations:
    """The requests of all engines: conversations that go on, or, while nothing is stored, repetitions of late
    requests. So a segment that the cluster has lost stays lost until `storing` is set again."""

    seed: int
    nodes: int
    layout: Layout
    storing: bool = True
    digests: dict[SegmentKey, bytes] = field(default_factory=dict)
    """The digest (`payload`) of each segment that was asked for."""

    def __post_init__(self) -> None:
        concurrent = CONVERSATIONS * self.nodes
        self._workload = BuiltinWorkload(REQUESTS, self.seed, prompt_tokens=(600, 2_000), concurrent=concurrent)
        self._identity = PayloadIdentity(self.seed, "default", self.layout.fingerprint())
        self._taken = 0
        self._draw = random.Random(self.seed)
        self._lock = threading.Lock()

    def draw(self, pool: Pool) -> Asked:
        """See `Source`."""
        with self._lock:
            storing = self.storing
            number = self._taken if storing else max(0, self._taken - self._draw.randint(1, RECENT))
            self._taken = (self._taken + storing) % REQUESTS
        tokens = self._workload[number].tokens
        keys = pool.prefix(tokens).keys
        with self._lock:
            known = [key in self.digests for key in keys]
            self.digests.update(zip(keys, self._identity.digests(tokens, self.layout.segment_tokens), strict=True))
        ideal = known.index(False) if False in known else len(known)
        return Asked(tokens, storing, not storing, number, ideal)
