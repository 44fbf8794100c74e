"""Matches that are begun, polled and cancelled, and matches that wait for other engines."""

from __future__ import annotations

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT_S, Prompt, match, store, wait_until
from tokenlake.errors import DeadlinePassed
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


WAIT = MatchOptions(in_flight_wait_s=10.0)


def test_a_prompt_is_computed_once(three: Cluster) -> None:
    prompt = Prompt(7, 12)
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second, three.connect(2, LAYOUT) as third:
        keys = first.prefix(prompt.tokens).keys
        with first.match(keys, WAIT, deadline_s=PATIENT_S) as lease:
            assert lease.hits == 0
        waiting = [pool.engine.begin_match(keys, WAIT, deadline_s=PATIENT_S) for pool in (second, third)]
        store(first, prompt)
        for pending in waiting:
            with pending.wait() as lease:
                assert lease.hits == 12
                assert prompt.wrong(lease.fetch(deadline_s=LIMIT_S)) == 0


def test_begin_poll_and_cancel(pool: Pool, shared: Cluster) -> None:
    prompt = Prompt(6, 40)
    store(pool, prompt)
    keys = pool.prefix(prompt.tokens).keys
    pending = pool.engine.begin_match(keys)
    wait_until(lambda: pending.poll() is not None, "the answer is here")
    lease = pending.poll()
    assert lease is not None
    assert lease.hits == 40
    lease.release()
    # The matches together would lease more than a session may: cancelled ones must leave no lease behind.
    for _ in range(10):
        pool.engine.begin_match(keys).cancel()
    answered = [pool.engine.begin_match(keys) for _ in range(3)]
    pool.match([]).release()
    for each in answered:
        each.cancel()
    wait_until(lambda: match(pool, prompt).hits == 40, "cancelled matches are given back")


def test_a_waiting_match_notices_a_frozen_daemon(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(Prompt(5, 4).tokens).keys
        pool.match(keys, WAIT).release()
        cluster.nodes[0].freeze()
        with pytest.raises(DeadlinePassed, match="did not answer within"):
            pool.match(keys, WAIT)
        assert pool.engine.timeouts == 1
        cluster.nodes[0].thaw()
