"""The time of a read while other nodes hand segments over to its node: on simulated links that take time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.test_simulation import LAYOUT
from tokenlake.core.cluster import transfers
from tokenlake.core.cluster.handover import HANDED_OVER
from tokenlake.core.cluster.transfers import Transfers
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cluster import SimulatedCluster
from tokenlake_bench.simulation.engine import RequestOutcome
from tokenlake_bench.simulation.options import SimulationOptions

NODES = 4
SEGMENT_TOKENS = 512
PREFIX, FLOOD = 24, 60
READER = 0


def prompt(first: int, segments: int) -> Arrival:
    return Arrival(0.0, segments * SEGMENT_TOKENS + 1, np.arange(first, first + segments, dtype=np.int64))


def read_s(*, flood: bool) -> float:
    """The time to read a prefix of a full node, by the engine of an empty node to which all others begin to hand
    segments over."""
    served: list[RequestOutcome] = []
    options = SimulationOptions(nodes=NODES, capacity_tokens=NODES * 375_000, layout=LAYOUT)
    cluster = SimulatedCluster(options, served.append)
    cluster.clock.run_until(cluster.clock.now + 2.0)
    writers = range(1, NODES)
    cluster.engines[NODES - 1].serve(prompt(1, PREFIX))
    for writer in writers:
        cluster.engines[writer].serve(prompt(10_000 * writer, 640))
    # The mean over 60 s of the lead of the empty node.
    cluster.clock.run_until(cluster.clock.now + 60.0)
    for writer in writers if flood else ():
        cluster.engines[writer].serve(prompt(1000 * writer, FLOOD))
    cluster.clock.run_until(cluster.clock.now + 0.02)
    cluster.engines[READER].serve(prompt(1, PREFIX))
    cluster.clock.run_until(cluster.clock.now + 10.0)
    (read,) = [each for each in served if each.node == READER]
    assert read.hits == read.remote == PREFIX
    handed_over = sum(node.core.counters[HANDED_OVER] for node in cluster.nodes)
    assert handed_over == (FLOOD * len(writers) if flood else 0), handed_over
    return read.read_s


def test_a_flood_of_segments_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that are handed over come one piece after the other, beside which a read takes little longer."""
    alone = read_s(flood=False)
    beside = read_s(flood=True)
    monkeypatch.setattr(transfers, "MAX_PIECE_BYTES", 1 << 40)
    monkeypatch.setattr(transfers, "PIECE_S", 1e6)
    monkeypatch.setattr(Transfers, "_enqueue", Transfers._start)
    unbounded = read_s(flood=True)
    assert beside < 1.5 * alone
    assert unbounded > 1.5 * beside
