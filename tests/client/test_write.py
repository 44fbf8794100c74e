"""Writes: reserve, fill, commit or abort."""

from __future__ import annotations

import numpy as np
import pytest

from tests.client.connections import answers
from tests.robustness.live import (
    LAYOUT,
    EngineProcess,
    Prompt,
    match,
    outcomes,
    read,
    store,
    total,
    wait_until,
)
from tokenlake.errors import DeadlinePassed
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def test_shards_come_from_two_processes(pool: Pool, shared: Cluster) -> None:
    prompt = Prompt(14, 3)
    with EngineProcess(shared.nodes[0].socket, pool.engine.session) as rank:
        begun = rank.ask("prepare", seed=14, segments=3)
        assert rank.ask("commit", shard=1)["codes"] == [Code.RESERVED] * 3
        assert outcomes(match(pool, prompt).codes) == {Code.PENDING}
        write = pool.engine.attach_write(begun["write"])
        for index, array in write.slots:
            array[: LAYOUT.shard_bytes] = np.frombuffer(prompt.content(index)[: LAYOUT.shard_bytes], np.uint8)
        assert outcomes(write.commit(0b01)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3


def test_a_write_in_a_frozen_daemon_is_given_back(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(6, 4)
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(prompt.tokens).keys
        write = pool.store(keys)
        node.freeze()
        with pytest.raises(DeadlinePassed):
            pool.store(pool.prefix(Prompt(7, 4).tokens).keys)
        write.abort()
        node.thaw()
        wait_until(lambda: answers(pool), "it answers again")
        # The write that was aborted meanwhile, and the write whose grant arrived late, were both given back.
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert outcomes(store(pool, Prompt(7, 4))) == {Code.COMMITTED}
        assert total(node, "tokenlake_quarantined_slots") == 0
