"""Matches that are begun, polled and cancelled, and matches that wait for other engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT_S, Prompt, match, store, wait_until
from tokenlake.errors import DeadlinePassed
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


WAIT = MatchOptions(in_flight_wait_s=10.0)


def wait_marked(pool: Pool, keys: Sequence[SegmentKey], code: Code) -> None:
    """Wait until a match of each of the `keys` says `code`: a match does not ask for keys behind the first one that is
    not there."""

    def marked() -> bool:
        return all(pool.match([key], deadline_s=PATIENT_S).codes == bytes([code]) for key in keys)

    wait_until(marked, f"all are {code.name}")


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


def test_a_match_waits_for_all_parts(three: Cluster) -> None:
    prompt = Prompt(8, 12)
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second:
        keys = first.prefix(prompt.tokens).keys
        first.engine.mark_in_flight(keys, 10.0)
        wait_marked(second, keys, Code.PENDING)
        waiting = second.engine.begin_match(keys, WAIT, deadline_s=PATIENT_S)
        for start in range(0, 12, 4):
            assert waiting.poll() is None
            part = [np.frombuffer(prompt.content(index), np.uint8) for index in range(start, start + 4)]
            assert set(first.store_all(keys[start : start + 4], part, start, 20.0)) == {Code.COMMITTED}
        with waiting.wait() as lease:
            assert lease.hits == 12
            assert prompt.wrong(lease.fetch(deadline_s=LIMIT_S)) == 0


def test_markers_end_when_removed_and_with_the_pool(three: Cluster) -> None:
    with three.connect(1, LAYOUT) as second:
        with three.connect(0, LAYOUT) as first:
            keys = first.prefix(Prompt(9, 12).tokens).keys
            first.engine.mark_in_flight(keys, 10.0)
            wait_marked(second, keys, Code.PENDING)
            first.engine.mark_in_flight(keys, 0.0)
            wait_marked(second, keys, Code.MISSING)
            first.engine.mark_in_flight(keys, 10.0)
            wait_marked(second, keys, Code.PENDING)
        wait_marked(second, keys, Code.MISSING)


def test_a_heartbeat_is_answered_while_a_match_waits(three: Cluster) -> None:
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second:
        keys = first.prefix(Prompt(10, 12).tokens).keys
        first.engine.mark_in_flight(keys, 10.0)
        wait_marked(second, keys, Code.PENDING)
        waiting = second.engine.begin_match(keys, WAIT, deadline_s=PATIENT_S)
        assert second.link.call(engine.Heartbeat, engine.HeartbeatReply, LIMIT_S).alive
        assert waiting.poll() is None
        first.engine.mark_in_flight(keys, 0.0)
        with waiting.wait() as lease:
            assert (lease.hits, lease.codes[0]) == (0, Code.MISSING)


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
    answered = pool.engine.begin_match(keys)
    answered.wait()
    answered.cancel()
    wait_until(lambda: match(pool, prompt).hits == 40, "cancelled matches are given back")


def test_a_cancelled_answer_is_given_back(pool: Pool) -> None:
    prompt = Prompt(7, 40)
    store(pool, prompt)
    keys = pool.prefix(prompt.tokens).keys
    pending = [pool.engine.begin_match(keys) for _ in range(3)]
    pool.match([]).release()
    for each in pending:
        each.cancel()
    with match(pool, prompt) as lease:
        assert lease.hits == 40


def test_a_waiting_match_notices_a_frozen_daemon(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(Prompt(5, 4).tokens).keys
        pool.match(keys, WAIT).release()
        cluster.nodes[0].freeze()
        with pytest.raises(DeadlinePassed, match="did not answer within"):
            pool.match(keys, WAIT)
        assert pool.engine.timeouts == 1
        cluster.nodes[0].thaw()
