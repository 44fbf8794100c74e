"""Weights that change in place: which keys the scheduler's side uses, and what it still stores."""

from __future__ import annotations

import pytest

from tests.connector.side import Bench, blocks_of, request
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.weights import digest_of_version

BASE = "00" * 32
NEW = "new weights"


def test_a_reset_never_comes_to_the_same_digest_twice() -> None:
    first, second = WeightsEpoch(BASE), WeightsEpoch(BASE)
    digests = [epoch.reset(empty=empty) for epoch in (first, second, first) for empty in (True, False)]
    assert len({BASE, *digests}) == 7


def test_a_version_is_taken_only_right_after_a_reset_that_emptied_the_cache() -> None:
    epoch = WeightsEpoch(BASE)
    assert epoch.named("step 1") is None, "what is cached may be of other weights"
    epoch.reset(empty=False)
    assert epoch.named("step 1") is None
    epoch.reset(empty=True)
    assert epoch.named("step 1") == digest_of("step 1")
    assert epoch.named("step 2") == digest_of("step 2"), "nothing was computed yet"
    epoch.computes()
    assert epoch.named("step 3") is None


def digest_of(version: str) -> str:
    return digest_of_version(BASE, version)


def test_what_was_stored_before_is_not_found_after() -> None:
    bench = Bench()
    bench.know(request(17).all_token_ids)
    assert bench.place(request(17, "before")) == 16
    bench.side.new_weights(NEW)
    assert bench.place(request(17, "after")) == 0
    bench.pool.known |= set(bench.pool.prefix(request(17).all_token_ids, weights_digest=NEW).keys)
    assert bench.place(request(17, "later")) == 16


@pytest.mark.parametrize("answered", [False, True])
def test_a_waiting_request_gives_back_what_was_found_and_asks_again(answered: bool) -> None:
    bench, asked = Bench(), request(17)
    bench.know(asked.all_token_ids)
    bench.pool.answers = answered
    bench.side.new_request(asked)
    assert bench.side.matched(asked, 0) == (16 if answered else None)
    bench.side.new_weights(NEW)
    assert bench.pool.matches[0].cancelled
    assert all(lease.released for lease in bench.pool.leases)
    bench.pool.answers = True
    assert bench.side.matched(asked, 0) == 0
    assert bench.pool.matches[1].keys == bench.pool.prefix(asked.all_token_ids, weights_digest=NEW).keys[:2]


def test_a_running_request_stores_nothing_more() -> None:
    """Its cache is of both weights: neither the old keys nor the new ones are right for it."""
    bench, asked = Bench(), request(40)
    bench.place(asked)
    assert bench.step(asked, 0, 16).saves
    bench.side.new_weights(NEW)
    assert not bench.step(asked, 16, 16).saves
    bench.step(asked, 32, 8)
    assert not bench.side.finished(asked, blocks_of(asked), complete=True)
    assert not bench.side.step([], lambda name: []).saves


def test_a_request_that_lost_its_blocks_is_stored_under_the_new_keys() -> None:
    bench, asked = Bench(), request(24)
    bench.place(asked)
    (old,) = bench.step(asked, 0, 24).saves
    bench.side.new_weights(NEW)
    assert bench.place(asked) == 0
    (new,) = bench.step(asked, 0, 24).saves
    assert new.keys == tuple(bench.pool.prefix(asked.all_token_ids, weights_digest=NEW).keys)
    assert not set(new.keys) & set(old.keys)


def test_what_the_old_weights_computed_is_still_stored_under_the_old_keys() -> None:
    bench, asked = Bench(), request(24)
    bench.place(asked)
    asked.num_computed_tokens = 23
    bench.step(asked, 0, 23)
    asked.all_token_ids += [7, 8]
    asked.num_computed_tokens = 25
    assert bench.side.finished(asked, blocks_of(asked), complete=True)
    bench.side.new_weights(NEW)
    (save,) = bench.side.step([], lambda name: []).saves
    assert set(save.keys) <= set(bench.pool.prefix(asked.all_token_ids).keys)


def test_others_wait_no_longer_for_what_is_not_stored_any_more() -> None:
    bench, asked = Bench(), request(40)
    bench.side.rates.prefill.add(8, 0, 0.0, 0.0)
    bench.side.new_request(asked)
    entry = bench.side._entries["r"]
    entry.gap = 0
    bench.side.new_weights(NEW)
    assert bench.pool.claimed == [(tuple(bench.pool.prefix(asked.all_token_ids).keys), 0.0)]
    assert entry.gap is None
