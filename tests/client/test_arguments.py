"""Values of public arguments that make no sense: the error names the argument, and the connection goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.robustness.live import LAYOUT, PATIENT_S, Prompt, match, store
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake_client import Deadlines, MatchOptions, Pool
from tokenlake_client.testing import MemoryPool

BAD_SECONDS = (-1.0, math.nan, math.inf, 1e12, "1", True)
LONG_S = 40 * 86400.0
"""Longer than poll takes, 24.8 days."""
CALLS: dict[str, Callable[[Pool, Any], object]] = {
    "match": lambda pool, seconds: pool.match([], deadline_s=seconds),
    "begin_match": lambda pool, seconds: pool.engine.begin_match([], deadline_s=seconds),
    "attach": lambda pool, seconds: pool.engine.attach(1, deadline_s=seconds),  # type: ignore[arg-type]
    "reserve": lambda pool, seconds: pool.engine.reserve([], deadline_s=seconds),
    "fetch": lambda pool, seconds: match(pool, Prompt(30, 2)).fetch(deadline_s=seconds),
    "fetch at most": lambda pool, seconds: match(pool, Prompt(30, 2)).fetch(at_most_s=seconds),
    "copy_into": lambda pool, seconds: match(pool, Prompt(30, 2)).copy_into([], deadline_s=seconds),
    "open_view": lambda pool, seconds: pool.queries.open_view(match(pool, Prompt(30, 2)), 2, 1.0, seconds),
    "store": lambda pool, seconds: pool.store([], patience=seconds),
    "store_all": lambda pool, seconds: pool.store_all([], [], patience=seconds),
    "mark_in_flight": lambda pool, seconds: pool.engine.mark_in_flight([], seconds),
    "options": lambda pool, seconds: MatchOptions(in_flight_wait_s=seconds),
    "options per segment": lambda pool, seconds: MatchOptions(in_flight_wait_per_segment_s=seconds),
    "options expected": lambda pool, seconds: MatchOptions(in_flight_expected_s=seconds),
    "deadlines": lambda pool, seconds: Deadlines(call_s=seconds),
}


@pytest.mark.parametrize("call", CALLS)
def test_seconds_that_are_none_are_named(call: str) -> None:
    with MemoryPool(LAYOUT) as pool:
        store(pool, Prompt(30, 2))
        for seconds in BAD_SECONDS:
            with pytest.raises(ValueError, match=r"argument '(deadline_s|at_most_s|patience|seconds|\w+_s)' is "):
                CALLS[call](pool, seconds)
        assert match(pool, Prompt(30, 2)).hits == 2
        assert pool.connected


def test_long_deadlines() -> None:
    with MemoryPool(LAYOUT) as pool:
        store(pool, Prompt(31, 2))
        with pool.match(pool.prefix(Prompt(31, 2).tokens).keys, deadline_s=LONG_S) as lease:
            assert len(lease.fetch(deadline_s=LONG_S)) == 2


@pytest.mark.parametrize("first", [-1, 1 << 32, 1.5])
def test_the_index_of_a_segment_is_checked(first: Any) -> None:
    with MemoryPool(LAYOUT) as pool:
        for call in (pool.store, pool.engine.reserve):
            with pytest.raises(ValueError, match="argument 'first' is "):
                call([], first)
        with pytest.raises(ValueError, match="argument 'prompt_tokens' is "):
            MatchOptions(prompt_tokens=first)
        assert pool.match([], deadline_s=PATIENT_S).hits == 0


@pytest.mark.parametrize(
    "tokens",
    [[-1], [1 << 32], [1.5], ["1"], [None], np.array([-1]), np.array([1.5]), b"abcd", 5, np.zeros((2, 2), int)],
)
def test_tokens_are_checked(tokens: Any) -> None:
    with MemoryPool(LAYOUT) as pool, pytest.raises((ValueError, TypeError, OverflowError), match="token ids"):
        pool.prefix(tokens)


def test_keys_of_another_length_are_named() -> None:
    with MemoryPool(LAYOUT) as pool:
        key, wrong = pool.prefix(Prompt(34, 1).tokens).keys[0], SegmentKey(b"12345")
        calls: list[Callable[[list[SegmentKey]], object]] = [
            pool.match,
            pool.store,
            pool.engine.reserve,
            lambda keys: pool.hint(keys, Hints()),
            lambda keys: pool.engine.mark_in_flight(keys, 1.0),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="element 1 of argument 'keys' has 5 bytes; expected 32"):
                call([key, wrong])
        assert pool.match([key], deadline_s=PATIENT_S).hits == 0, "the session goes on"


def test_hints_are_checked() -> None:
    with MemoryPool(LAYOUT) as pool:
        with pytest.raises(ValueError, match="argument 'hints' is None; expected hints"):
            pool.hint(pool.prefix(Prompt(34, 1).tokens).keys, None)  # type: ignore[arg-type]
        assert pool.match([], deadline_s=PATIENT_S).hits == 0, "the session goes on"


def test_arrays_that_do_not_fit_their_keys_are_named() -> None:
    size = LAYOUT.segment_bytes
    right = np.zeros(size, np.uint8)
    cases: list[tuple[Any, str]] = [
        ([right], "the source has 1 arrays for 2 keys"),
        ([right, right[1:]], rf"array 1 of the source has dtype uint8 and shape \({size - 1},\); .* \({size},\)"),
        ([right, right.view(np.float32)], "array 1 of the source has dtype float32"),
    ]
    with MemoryPool(LAYOUT) as pool:
        keys = pool.prefix(Prompt(35, 2).tokens).keys
        for source, message in cases:
            with pytest.raises(ValueError, match=message):
                pool.store_all(keys, source)
            with pytest.raises(ValueError, match=message), pool.store(keys) as write:
                write.fill(source)
        assert pool.match(keys, deadline_s=PATIENT_S).hits == 0, "nothing is stored"


def test_everything_may_be_closed_twice() -> None:
    """A write that is open when its pool is closed keeps its process known to the daemon."""
    with MemoryPool(LAYOUT) as pool:
        keys = pool.prefix(Prompt(32, 2).tokens).keys
        lease, write, reservation = match(pool, Prompt(30, 2)), pool.store(keys[:1]), pool.engine.reserve(keys[1:])
        transfer = pool.engine.init_transfer([(pool.prefix(Prompt(33, 1).tokens).keys, 0)])
        for _ in range(2):
            lease.release()
            write.abort()
            reservation.release()
            pool.close()
        cache = np.zeros((LAYOUT.kv_heads, LAYOUT.segment_tokens, LAYOUT.key_dim), np.float32)
        transfer.put(0, [(cache, cache)])
        for _ in range(2):
            transfer.abort()
        assert transfer.wait(0.0), "the segments have failed"
        assert transfer.codes[0][0] != 0
