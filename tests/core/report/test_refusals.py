"""Refusals: final once no attempt follows, and apart from those that a retry cured."""

from __future__ import annotations

import pytest

from tests.core.scenes import calm, placed, prepare, store, tell
from tests.sim.cluster import Cluster
from tokenlake.core.report import refusals
from tokenlake.core.report.refusals import FINAL_S, REFUSED, RETRIED
from tokenlake.metrics import Metric
from tokenlake.wire import engine


def counted(cluster: Cluster, metric: Metric) -> dict[str, int]:
    """By code, without the zeros."""
    counts = cluster.core(0).counters.by_labels(metric)
    return {code: count for (_, code), count in counts.items() if count}


@pytest.mark.parametrize("retried", [True, False], ids=["again", "by another engine"])
def test_a_refusal_that_a_retry_cured_is_not_final(retried: bool) -> None:
    """The engine, or another one, stores the segment meanwhile."""
    cluster = calm(session_reserve_share=0.25, dirty_share=1.0)
    keys = placed(cluster, 0, 1, 4)
    writer = cluster.join(0)
    reply = prepare(cluster, writer, keys)
    if retried:
        prepare(cluster, writer, keys[3:], 3)
        cluster.run_for(FINAL_S / 2)
        tell(cluster, writer.processes[0], engine.Abort(reply.write))
    store(cluster, writer if retried else cluster.join(0), keys[3:], 3)
    cluster.run_for(2 * FINAL_S)
    assert (counted(cluster, REFUSED), counted(cluster, RETRIED)) == ({}, {"SESSION_LIMIT": 1})


def test_a_refusal_without_a_further_attempt_is_final() -> None:
    cluster = calm(session_reserve_share=0.25, dirty_share=1.0)
    keys = placed(cluster, 0, 1, 5)
    writer = cluster.join(0)
    prepare(cluster, writer, keys)
    cluster.run_for(FINAL_S - 1)
    prepare(cluster, writer, keys[3:4], 3)
    assert counted(cluster, REFUSED) == {}
    cluster.run_for(2)
    assert counted(cluster, REFUSED) == {"SESSION_LIMIT": 1}, "the other was tried again"
    cluster.run_for(FINAL_S)
    assert (counted(cluster, REFUSED), counted(cluster, RETRIED)) == ({"SESSION_LIMIT": 2}, {})
    assert cluster.core(0).census()["refused segments"] == 0


def test_the_memory_of_refusals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_REFUSED", 3)
    cluster = calm(session_reserve_share=0.25, dirty_share=1.0)
    prepare(cluster, cluster.join(0), placed(cluster, 0, 1, 9))
    assert cluster.core(0).census()["refused segments"] == 3
    assert counted(cluster, REFUSED) == {"SESSION_LIMIT": 3}
