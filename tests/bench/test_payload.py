"""The bytes of a segment differ with everything that identifies it, and the check detects every other content."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tokenlake_bench.payload import PayloadIdentity, fill, wrong_bytes

SEGMENT = 16
PAGE = 1 << 16
SIZES = [1, 63, 64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 4097]
IDENTITY = PayloadIdentity(seed=1, tenant="a", fingerprint=b"layout")
TOKENS = np.arange(5 * SEGMENT + 3, dtype=np.uint32)


def filled(digest: bytes, size: int = 2 * PAGE + 100) -> NDArray[np.uint8]:
    out = np.zeros(size, dtype=np.uint8)
    fill(out, digest)
    return out


def test_digests_are_one_per_full_segment_and_repeat() -> None:
    digests = IDENTITY.digests(TOKENS, SEGMENT)
    assert len(digests) == len(set(digests)) == 5
    assert digests == IDENTITY.digests(TOKENS.copy(), SEGMENT)
    assert digests[:3] == IDENTITY.digests(TOKENS[: 3 * SEGMENT], SEGMENT)
    assert IDENTITY.digests(TOKENS[: SEGMENT - 1], SEGMENT) == []


@given(st.integers(0, 5 * SEGMENT - 1))
def test_a_changed_token_changes_all_later_segments(position: int) -> None:
    changed = TOKENS.copy()
    changed[position] ^= 1
    pairs = zip(IDENTITY.digests(TOKENS, SEGMENT), IDENTITY.digests(changed, SEGMENT), strict=True)
    first = position // SEGMENT
    assert [a == b for a, b in pairs] == [number < first for number in range(5)]


@pytest.mark.parametrize(
    "other",
    [
        PayloadIdentity(2, "a", b"layout"),
        PayloadIdentity(1, "b", b"layout"),
        PayloadIdentity(1, "", b"layout"),
        PayloadIdentity(1, "a", b"layouu"),
        PayloadIdentity(1, "al", b"ayout"),
    ],
)
def test_seed_tenant_and_layout_change_every_segment(other: PayloadIdentity) -> None:
    for a, b in zip(IDENTITY.digests(TOKENS, SEGMENT), other.digests(TOKENS, SEGMENT), strict=True):
        assert a != b
        assert wrong_bytes(filled(a), b)


@pytest.mark.parametrize("size", SIZES)
def test_read_only_and_unaligned_bytes_are_accepted(size: int) -> None:
    digest, other = IDENTITY.digests(TOKENS, SEGMENT)[:2]
    data = filled(digest, size)
    data.flags.writeable = False
    assert not wrong_bytes(data, digest)
    assert size < 8 or wrong_bytes(data, other)
    unaligned = np.zeros(size + 3, dtype=np.uint8)[3:]
    fill(unaligned, digest)
    assert np.array_equal(unaligned, data)
    assert not wrong_bytes(unaligned, digest)


@given(st.integers(0, 8 * (2 * PAGE + 100) - 1))
def test_one_flipped_bit_is_found(bit: int) -> None:
    digest = IDENTITY.digests(TOKENS, SEGMENT)[0]
    data = filled(digest)
    data[bit // 8] ^= 1 << bit % 8
    assert wrong_bytes(data, digest)


def test_every_line_of_64_bytes_is_its_own() -> None:
    first, second = IDENTITY.digests(TOKENS, SEGMENT)[:2]
    lines = np.concatenate([filled(first, 2 * PAGE), filled(second, 2 * PAGE)]).reshape(-1, 64)
    assert len(np.unique(lines, axis=0)) == len(lines)


def test_bytes_are_the_same_in_every_version() -> None:
    digest = IDENTITY.digests(TOKENS, SEGMENT)[0]
    assert digest.hex() == "079d0477c6e613a337144d1a4050735b"
    assert filled(digest)[PAGE : PAGE + 8].tobytes().hex() == "87c175db5c02c29c"
