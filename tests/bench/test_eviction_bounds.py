"""The clairvoyant cache against exhaustive search, and the infinite cache against that of `baselines`."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tokenlake_bench.baselines import Accesses, Prompt, global_lru, infinite_cache
from tokenlake_bench.eviction.bounds import bounds_of


def accesses(texts: list[tuple[int, ...]]) -> Accesses:
    """Segments of 10 tokens, prompts 3 longer; all letters up to its end identify a segment."""
    ids: dict[tuple[int, ...], int] = {}
    chains = [tuple(ids.setdefault(text[: end + 1], len(ids)) for end in range(len(text))) for text in texts]
    return Accesses(10, [Prompt(10 * len(chain) + 3, chain) for chain in chains])


def best_choice(asked: Accesses, capacity: int) -> int:
    """Hit segments of the best of all ways to keep at most `capacity` of the held or touched segments at each
    request."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in asked.prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            found = next((depth for depth, segment in enumerate(prompt.chain) if segment not in held), None)
            total = hits + (len(prompt.chain) if found is None else found)
            there = sorted(held | set(prompt.chain))
            for kept in combinations(there, min(capacity, len(there))):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), total)
        best = after
    return max(best.values())


TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=3).map(tuple), min_size=1, max_size=9)


@given(TEXTS, st.integers(1, 4))
def test_the_clairvoyant_bound_is_exact(texts: list[tuple[int, ...]], capacity: int) -> None:
    asked = accesses(texts)
    assert bounds_of(asked).clairvoyant(capacity).hit_tokens == 10 * best_choice(asked, capacity)


MORE = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=40)


@given(MORE, st.integers(1, 12))
def test_between_lru_and_an_infinite_cache(texts: list[tuple[int, ...]], capacity: int) -> None:
    asked = accesses(texts)
    bounds = bounds_of(asked)
    assert bounds.infinite() == infinite_cache(asked)
    assert bounds.clairvoyant(10_000) == bounds.infinite()
    assert global_lru(asked, capacity * 10).hit_tokens <= bounds.clairvoyant(capacity).hit_tokens


def test_what_is_never_read_again_is_not_stored() -> None:
    # LRU loses ab to xyz each time; the clairvoyant cache knows that x, y and z are not used again.
    asked = accesses([(0, 1), (5, 6, 7), (0, 1), (8, 6, 7), (0, 1)])
    assert global_lru(asked, 30).hit_tokens == 0
    assert bounds_of(asked).clairvoyant(2).hit_tokens == 40
