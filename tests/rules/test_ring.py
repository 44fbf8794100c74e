"""Ring: shares, the keys that move with a change of members, independence of the members' order, the epoch.

Keys are blake2b of consecutive numbers. With 128 virtual nodes a share's standard deviation is about 9 % of it
(`VIRTUAL_NODES`); the bounds are 3.5 of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.ring import Ring

KEYS = [SegmentKey(hashlib.blake2b(str(number).encode(), digest_size=KEY_BYTES).digest()) for number in range(20_000)]
SOME = KEYS[:300]

names = st.sets(st.text("abcdefgh|=#0123456789", min_size=1, max_size=6), min_size=1, max_size=8)


def ring_of(weights: dict[str, int], run_length: int = 1) -> Ring:
    return Ring({NodeId(name): weight for name, weight in weights.items()}, run_length)


def candidates(ring: Ring, keys: list[SegmentKey]) -> list[tuple[NodeId, NodeId]]:
    return ring.candidates(b"".join(keys))


@pytest.mark.parametrize(
    "weights",
    [
        {f"node-{index}": 1 for index in range(2)},
        {f"node-{index}": 64 << 30 for index in range(3)},
        {f"node-{index}": 1 for index in range(16)},
        {f"node-{index}": 1 for index in range(64)},
        {"small": 1, "middle": 2, "large": 5},
        {f"node-{index}": 1 + index % 4 for index in range(12)},
    ],
    ids=["2", "3", "16", "64", "1:2:5", "12 of 4 weights"],
)
def test_every_share_follows_the_weight(weights: dict[str, int]) -> None:
    pairs = candidates(ring_of(weights), KEYS)
    mean = sum(weights.values()) / len(weights)
    directory_nodes = Counter(directory_node for directory_node, _ in pairs)
    for name, weight in weights.items():
        expected = weight / sum(weights.values())
        deviation = (128 * weight / mean) ** -0.5
        assert abs(directory_nodes[NodeId(name)] / len(KEYS) - expected) < 3.5 * deviation * expected, name


@given(names, st.integers(0, 255))
@settings(max_examples=examples(40))
def test_a_key_has_the_same_candidates_alone_as_among_many(members: set[str], first: int) -> None:
    """The keys include both ends of the circle, where it begins again."""
    ring = ring_of(dict.fromkeys(sorted(members), 1))
    ends = [SegmentKey(bytes([byte]) * KEY_BYTES) for byte in (0, 255)]
    keys = [*ends, *KEYS[first : first + 50]]
    assert candidates(ring, keys) == [candidates(ring, [key])[0] for key in keys]


@given(names)
@settings(max_examples=examples(40))
def test_candidates_differ_and_a_single_member_is_both(members: set[str]) -> None:
    ring = ring_of(dict.fromkeys(sorted(members), 1))
    for directory_node, other in candidates(ring, SOME):
        assert {directory_node, other} <= members
        assert (directory_node == other) == (len(members) == 1)


@given(names.filter(lambda members: len(members) >= 3), st.data())
@settings(max_examples=examples(40))
def test_a_member_that_leaves_moves_only_its_keys(members: set[str], data: st.DataObject) -> None:
    gone = NodeId(data.draw(st.sampled_from(sorted(members))))
    before = candidates(ring_of(dict.fromkeys(sorted(members), 1)), SOME)
    after = candidates(ring_of(dict.fromkeys(sorted(members - {gone}), 1)), SOME)
    for old, new in zip(before, after, strict=True):
        if old[0] != gone:
            assert new[0] == old[0]
        if gone not in old:
            assert new == old


def test_a_weighted_member_that_leaves_moves_little_else() -> None:
    # Weights count relative to their mean, which changes: the others gain or lose virtual nodes in proportion.
    weights = {f"node-{index}": 1 + index for index in range(6)}
    before = candidates(ring_of(weights), KEYS)
    after = candidates(ring_of({name: weight for name, weight in weights.items() if name != "node-5"}), KEYS)
    moved = sum(old[0] not in ("node-5", new[0]) for old, new in zip(before, after, strict=True))
    assert moved / len(KEYS) < 0.08


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(1, 9), min_size=1, max_size=6), st.randoms())
@settings(max_examples=examples(40))
def test_the_order_of_members_does_not_matter(weights: dict[str, int], random: Random) -> None:
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    one, other = ring_of(weights), ring_of(dict(shuffled))
    assert one.epoch == other.epoch
    assert one.members == other.members
    assert candidates(one, SOME) == candidates(other, SOME)


def test_no_keys_have_no_candidates() -> None:
    assert ring_of({"a": 1, "b": 1, "c": 1}).candidates(b"") == []


def test_the_epoch_depends_on_members_weights_and_run_length() -> None:
    base = {"a": 1, "b": 2}
    rings = [
        ring_of(base),
        ring_of({"a": 1}),
        ring_of({"a": 1, "c": 2}),
        ring_of({"a": 2, "b": 1}),
        ring_of({"a": 1, "b": 3}),
        ring_of(base, run_length=4),
        # Names that look like a part of the encoded list of members.
        ring_of({"a=1|b": 2}),
        ring_of({"a": 1, "b": 2, "E": 1}),
    ]
    epochs = [ring.epoch for ring in rings]
    assert len(set(epochs)) == len(rings)
    assert all(0 <= epoch < 1 << 63 for epoch in epochs)
    assert ring_of(base).epoch == epochs[0]


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": 1, "b": -1}])
def test_a_ring_without_members_or_weight_is_refused(weights: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one member"):
        ring_of(weights)
