"""Digests of the images, sounds and videos of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.vllm.known.request import media_digests
from tokenlake_client.engines.vllm.served_request import unnamed_media

A, B = "a" * 64, "b" * 64


@dataclass
class Feature:
    identifier: str
    offset: int
    length: int
    modality: str = "image"
    mm_hash: str | None = None

    @property
    def mm_position(self) -> SimpleNamespace:
        return SimpleNamespace(offset=self.offset, length=self.length)


def keys(*features: Feature, segments: int = 5) -> list[SegmentKey]:
    chain = Prefix(SegmentKey(b"\0" * 32), 8, media_digests(features, 8))
    chain.extend([7] * 8 * segments)
    return chain.keys


def equal(one: list[SegmentKey], other: list[SegmentKey]) -> int:
    """The number of equal keys before the first one that differs. All keys behind it must differ."""
    count = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    assert all(mine != theirs for mine, theirs in zip(one[count:], other[count:], strict=True))
    return count


def test_a_prompt_of_text_has_no_digests() -> None:
    assert media_digests([], 8) is None


def test_an_image_is_in_each_segment_with_tokens_of_it() -> None:
    found = media_digests([Feature(A, 12, 13)], 8)
    assert found is not None
    assert sorted(found) == [1, 2, 3]
    assert sorted(media_digests([Feature(A, 8, 8)], 8) or ()) == [1]
    assert media_digests([Feature(A, 12, 13), Feature(B, 30, 2)], 8) == media_digests(
        [Feature(B, 30, 2), Feature(A, 12, 13)], 8
    )


def test_each_part_of_an_image_changes_the_keys() -> None:
    """Everything about an image changes the keys from its first segment on."""
    one = keys(Feature(A, 12, 13))
    assert equal(one, keys(Feature(A, 12, 13))) == 5
    others = [Feature(B, 12, 13), Feature(A, 12, 12), Feature(A, 13, 13), Feature(A, 12, 13, "video")]
    for other in others:
        assert equal(one, keys(other)) == 1
    assert equal(one, keys()) == 1
    assert equal(one, keys(Feature(A, 12, 13), Feature(A, 26, 2))) == 3
    assert equal(keys(Feature(A, 10, 2), Feature(B, 12, 2)), keys(Feature(B, 10, 2), Feature(A, 12, 2))) == 1


def test_the_name_of_an_adapter_is_not_in_the_keys() -> None:
    """vLLM writes it before the hash where an adapter changes the encoder; the keys have the adapter's digest."""
    assert keys(Feature(f"adapter 1:{A}", 0, 8, mm_hash=A)) == keys(Feature(f"adapter 2:{A}", 0, 8, mm_hash=A))
    assert unnamed_media([Feature(f"adapter 1:{A}", 0, 8, mm_hash=A)]) is None


def test_names_of_the_client_are_refused() -> None:
    assert unnamed_media([]) is None
    assert unnamed_media([Feature(A, 0, 8), Feature(B * 2, 8, 8)]) is None
    for name in ("mine", A[:-1], A.upper(), ""):
        reason = unnamed_media([Feature(A, 0, 8), Feature(name, 8, 8)])
        assert reason is not None
        assert "multi_modal_uuids" in reason
