"""Weights that change in place: the keys of new lookups and saves, and the saves under way."""

from __future__ import annotations

import pytest

from tests.connector.side import Bench, prefill, request
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.weights import digest_of_version

BASE = "00" * 32
NEW = "new weights"


def test_each_reset_has_its_own_digest() -> None:
    first, second = WeightsEpoch(BASE), WeightsEpoch(BASE)
    digests = [epoch.reset(empty=empty) for epoch in (first, second, first) for empty in (True, False)]
    assert len({BASE, *digests}) == 7


def test_a_version_needs_a_reset_that_emptied_the_cache() -> None:
    epoch = WeightsEpoch(BASE)
    assert epoch.named("step 1") is None, "vLLM's cache may hold results of other weights"
    epoch.reset(empty=False)
    assert epoch.named("step 1") is None
    epoch.reset(empty=True)
    assert epoch.named("step 1") == digest_of("step 1")
    assert epoch.named("step 2") == digest_of("step 2"), "the cache is still empty after the reset"
    epoch.computes()
    assert epoch.named("step 3") is None


def digest_of(version: str) -> str:
    return digest_of_version(BASE, version)


@pytest.mark.parametrize("answered", [False, True])
def test_new_weights_restart_a_waiting_lookup(answered: bool) -> None:
    bench, asked = Bench(), request(17)
    bench.know(asked.all_token_ids)
    bench.pool.answers = answered
    assert bench.ask(asked) == (16 if answered else None)
    bench.side.new_weights(NEW)
    assert bench.pool.matches[0].cancelled
    assert all(lease.released for lease in bench.pool.leases)
    bench.pool.answers = True
    assert bench.side.matched(asked, 0) == 0
    assert bench.pool.matches[1].keys == bench.pool.prefix(asked.all_token_ids, weights_digest=NEW).keys[:2]


def test_planned_saves_keep_keys_of_the_old_weights() -> None:
    bench, asked = Bench(), request(24)
    bench.place(asked)
    asked.num_computed_tokens = 23
    bench.step(asked, 0, 23)
    asked.all_token_ids += [7, 8]
    asked.num_computed_tokens = 25
    assert bench.end(asked)[0]
    bench.side.new_weights(NEW)
    (save,) = bench.idle().saves
    assert set(save.keys) <= set(bench.pool.prefix(asked.all_token_ids).keys)


def test_new_weights_remove_in_flight_markers() -> None:
    bench, asked = Bench(), request(100)
    prefill(bench)
    assert bench.place(asked) == 0
    assert bench.pool.matches[-1].options.in_flight_wait_s > 0, "the lookup set a marker"
    bench.side.new_weights(NEW)
    removed = [(tuple(bench.pool.prefix(asked.all_token_ids).keys), 0.0)]
    assert bench.pool.marked == removed
    bench.side.new_weights("newer weights")
    assert bench.pool.marked == removed, "there is no marker any more"
