"""Ring: shares, the keys that move with a change of members, independence of the members' order.

Keys are blake2b of consecutive numbers. With 128 virtual nodes a share's standard deviation is about 9 % of it
(`UNIT_SHARE`); the bounds are 3.5 of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.keys import KEY_BYTES

KEYS = [SegmentKey(hashlib.blake2b(str(number).encode(), digest_size=KEY_BYTES).digest()) for number in range(20_000)]
SOME = KEYS[:300]

names = st.sets(st.text("abcdefgh|=#0123456789", min_size=1, max_size=6), min_size=1, max_size=8)


def ring_of(weights: dict[str, int]) -> Ring:
    return Ring(RingRecord.of(weights))


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


def test_a_weighted_member_that_leaves_moves_nothing_else() -> None:
    weights = {f"node-{index}": 1 + index for index in range(6)}
    record = RingRecord.of(weights)
    before, after = candidates(Ring(record), KEYS), candidates(Ring(record.without("node-5")), KEYS)
    assert not any(old[0] not in ("node-5", new[0]) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("size", [16 << 30, 64 << 30, 128 << 30])
def test_a_member_that_joins_takes_its_share(size: int) -> None:
    """A member that joins takes its share, and nothing else moves."""
    record = RingRecord.of({f"node-{index}": 64 << 30 for index in range(8)})
    former, ring = Ring(record), Ring(record.with_member("new", size))
    moved = ring.moved(former, b"".join(KEYS))
    ideal = size / (8 * (64 << 30) + size)
    deviation = (128 * size / (64 << 30)) ** -0.5
    assert sum(moved) / len(KEYS) < (1 + 3 * deviation) * ideal
    firsts = zip(candidates(former, KEYS), candidates(ring, KEYS), strict=True)
    assert [old[0] != new[0] for old, new in firsts] == moved
    assert all(new[0] == "new" for new, has in zip(candidates(ring, KEYS), moved, strict=True) if has)
    assert ring.moved(former, b"".join(KEYS[:5])) == moved[:5]


def test_a_draining_member_is_not_on_the_ring() -> None:
    record = RingRecord.of({"a": 1, "b": 1, "c": 1})
    assert candidates(Ring(record.draining("b")), SOME) == candidates(Ring(record.without("b")), SOME)


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(1, 9), min_size=1, max_size=6), st.randoms())
@settings(max_examples=examples(40))
def test_the_order_of_members_does_not_matter(weights: dict[str, int], random: Random) -> None:
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    one, other = ring_of(weights), ring_of(dict(shuffled))
    assert one.members == other.members
    assert candidates(one, SOME) == candidates(other, SOME)


def test_no_keys_have_no_candidates() -> None:
    assert ring_of({"a": 1, "b": 1, "c": 1}).candidates(b"") == []


def test_a_ring_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        ring_of({})
