"""Bytes read and written per tenant, against what the engines of the scene did."""

from __future__ import annotations

import collections
import random

from tests.core.scenes import calm
from tests.sim.arena import SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tokenlake.core.context import READ_BYTES
from tokenlake.core.writes import WRITTEN_BYTES
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine


def counted(cluster: Cluster, metric: Metric) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for node in range(len(cluster.nodes)):
        sums.update(cluster.core(node).counters.by_label(metric))
    return dict(sums)


def test_each_byte_is_counted_once_where_it_lay() -> None:
    cluster = calm(3, regions=6, hot="off", dirty_share=1.0)
    draw = random.Random(7)
    engines = [cluster.join(node, tenant) for node in range(3) for tenant in ("red", "blue")]
    cluster.run_for(0.05)
    for _ in range(150):
        chosen = draw.choice(engines)
        keys = prompt(draw.choice("abcde"), draw.randrange(1, 4))
        if draw.random() < 0.5:
            chosen.store(keys, 0, Storing())
        else:
            chosen.read(keys, Reading(hold_s=0.05))
        cluster.run_for(0.1)
    read: collections.Counter[str] = collections.Counter()
    written: collections.Counter[str] = collections.Counter()
    for each in engines:
        for answer in each.answers:
            if isinstance(answer, engine.Fetched):
                read[each.tenant] += answer.codes.count(Code.LOCAL) * SLOT_BYTES
            elif isinstance(answer, engine.Committed):
                written[each.tenant] += answer.codes.count(Code.COMMITTED) * SLOT_BYTES
    assert counted(cluster, WRITTEN_BYTES) == dict(written)
    assert counted(cluster, READ_BYTES) == dict(read)
    assert set(read) == set(written) == {"red", "blue"}
