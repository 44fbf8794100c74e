"""Segment keys: golden vectors, keys that are made in steps, equal and refused inputs, and the effect of each input."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.identity import Fingerprint, SegmentKey
from tokenlake.keys import KEY_BYTES, Prefix, Salt, TokenIds, opaque_keys, probe, root_key

SECRET = b"tenant a's secret"
FINGERPRINT = Fingerprint(bytes(range(32)))
ROOT = "4428ed4ed3cb1e9ea1b5a69f8577d891a4d01fe03b8f79b3c21f228c99ab3fbf"
ROOT_WITH_ADAPTER = "ad1e8bc4a3175de903fc26c2e38670d0a26dad4186c612193d93775c8dd44f4b"
ROOT_WITH_SALT = "7dbeb7b575eab6ac94f0f55f91348c4ca4c950215a1b6a0449dc7b91d49460c7"
TOKENS = [0, 1, 2, 3, 4, 0xFFFFFFFF, 6, 7, 8, 9, 10, 11]
KEYS = [
    "7c3e48281b4cd3a8be19de6d071eb1763077c30d884aadcc939d2040ad42b60d",
    "1799060c85d16c68764c61ccdb4081f7565edadaf2f36ff01a1ccb79e5e5ef4f",
    "1797a666222609777edd179afcacbfea0a753b3ea66d4ee9c20823871e449014",
]
KEYS_WITH_EXTRAS = [
    KEYS[0],
    "f9df7653d10b082618489278ec31d6e3d761626f0f365cbdd8a8dc989d6330b5",
    "5618d060d2cfbc74589eaeec7b813ed30ecdc6c2ea0f16c627b2a3c56505d199",
]
"""Extras `image` and an empty one at segment 1. All vectors: hashlib over bytes written out by hand."""
ENGINE_KEY = bytes(range(100, 132))
OPAQUE_KEY = "4a8327b50970d1557e38febb44236891509c104c9d711dc7201d8995d6d4a9c0"
"""Of group 0."""
OPAQUE_KEY_WITH_ADAPTER = "49890144f8cf5aed0224b67a80fede19ce02464c2d824e1dde6a3a5b7e980bdf"
"""Of group 3."""
OPAQUE_KEY_WITH_SALT = "fb20d98bde0ce1e656a478b12c8d428c2cbfa3d475c8db46707ed3fce1272ab1"
"""Of group 300."""

token_ids = st.integers(0, 0xFFFFFFFF)


def keys_of(
    tokens: TokenIds,
    segment_tokens: int = 4,
    extras: Mapping[int, Iterable[bytes]] | None = None,
    root: SegmentKey | None = None,
) -> list[SegmentKey]:
    chain = Prefix(root or root_key(SECRET, FINGERPRINT), segment_tokens, extras)
    chain.extend(tokens)
    return chain.keys


def test_the_root_is_the_golden_vector() -> None:
    assert root_key(SECRET, FINGERPRINT).hex() == ROOT
    assert root_key(SECRET, FINGERPRINT, adapter="lora-1").hex() == ROOT_WITH_ADAPTER
    assert root_key(SECRET, FINGERPRINT, salt="pepper").hex() == ROOT_WITH_SALT


def test_the_keys_are_the_golden_vectors() -> None:
    assert [key.hex() for key in keys_of(TOKENS)] == KEYS
    assert [key.hex() for key in keys_of(TOKENS, extras={1: [b"image", b""]})] == KEYS_WITH_EXTRAS


def opaque_key(
    secret: bytes, fingerprint: Fingerprint, group: int, engine_key: bytes, salt: Salt = None, **parts: str
) -> SegmentKey:
    (key,) = opaque_keys(secret, fingerprint, [(group, engine_key)], salt=salt, **parts)
    return key


def test_opaque_keys_are_the_golden_vectors() -> None:
    assert opaque_key(SECRET, FINGERPRINT, 0, ENGINE_KEY).hex() == OPAQUE_KEY
    assert opaque_key(SECRET, FINGERPRINT, 3, ENGINE_KEY, adapter="lora-1").hex() == OPAQUE_KEY_WITH_ADAPTER
    assert opaque_key(SECRET, FINGERPRINT, 300, ENGINE_KEY, salt="pepper").hex() == OPAQUE_KEY_WITH_SALT


def test_each_part_of_the_identity_changes_every_key() -> None:
    parts: list[dict[str, Any]] = [{}, {"adapter": "x"}, {"salt": "x"}, {"adapter": ""}, {"salt": ""}]
    parts += [{"secret": b"tenant b's secret"}, {"fingerprint": Fingerprint(bytes(32))}]
    whole = [{"secret": SECRET, "fingerprint": FINGERPRINT, **each} for each in parts]
    roots = {root_key(each.pop("secret"), each.pop("fingerprint"), **each) for each in map(dict, whole)}
    opaque = {opaque_key(group=0, engine_key=ENGINE_KEY, **each) for each in whole}
    opaque |= {opaque_key(SECRET, FINGERPRINT, 1, ENGINE_KEY), opaque_key(SECRET, FINGERPRINT, 0, bytes(32))}
    chains = {key for root in roots for key in keys_of(TOKENS, root=root)}
    assert (len(roots), len(opaque), len(chains), len(roots | opaque | chains)) == (7, 9, 21, 37)


@pytest.mark.parametrize("size", [0, 8, 16, 31, 33, 64])
def test_an_engine_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"has {size} bytes; expected 32"):
        opaque_key(SECRET, FINGERPRINT, 0, bytes(size))


@pytest.mark.parametrize("group", [-1, 1 << 32])
def test_a_cache_group_out_of_range_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match="group"):
        opaque_key(SECRET, FINGERPRINT, group, ENGINE_KEY)


def test_a_request_cannot_choose_the_salt_of_another() -> None:
    """Pairs of an engine's and a request's salt: no two of them have one root, whatever texts they are."""
    texts = [None, "", "a", "ab", "b", "1:a", "1:ab", "2:ab", "null", "[null,'a']", "\0a"]
    salts: list[Salt] = [*texts, *((ours, theirs) for ours in texts for theirs in texts if theirs is not None)]
    assert len({root_key(SECRET, FINGERPRINT, salt=salt) for salt in salts}) == len(salts)
    opaque = {opaque_key(SECRET, FINGERPRINT, 0, ENGINE_KEY, salt=salt) for salt in salts}
    assert len(opaque) == len(salts)


def test_the_probe_depends_on_secret_and_layout() -> None:
    probes = {
        probe(SECRET, FINGERPRINT),
        probe(b"other", FINGERPRINT),
        probe(SECRET, Fingerprint(bytes(32))),
    }
    assert len(probes) == 3
    assert all(len(key) == KEY_BYTES for key in probes)


@given(st.lists(token_ids, max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(1, 7))
def test_growing_in_steps_is_the_same_as_at_once(tokens: list[int], cuts: list[int], segment_tokens: int) -> None:
    extras = {0: [b"a"], 2: [b"b", b"c"]}
    chain = Prefix(root_key(SECRET, FINGERPRINT), segment_tokens, extras)
    kept = chain.keys
    bounds = sorted({0, *(min(cut, len(tokens)) for cut in cuts), len(tokens)})
    for start, stop in itertools.pairwise(bounds):
        chain.extend(tokens[start:stop])
    assert chain.tokens == len(tokens)
    assert len(chain.keys) == len(tokens) // segment_tokens
    assert kept == keys_of(tokens, segment_tokens, extras)


@given(st.lists(st.integers(0, 0x7FFF), max_size=20))
def test_every_row_of_integers_gives_the_same_keys(tokens: list[int]) -> None:
    expected = keys_of(tokens)
    forms: list[Any] = [tuple(tokens), array("I", tokens), array("q", tokens), [np.int64(token) for token in tokens]]
    forms += [np.array(tokens, dtype) for dtype in ("u2", "<u4", ">u4", "i4", "i8", ">i8", "u8")]
    forms.append(np.array([[token, 7] for token in tokens], dtype=np.int64).reshape(-1, 2)[:, 0])
    for form in forms:
        assert keys_of(form) == expected, type(form)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 64, 1.0, "1", None])
@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_a_token_out_of_range_is_refused_and_changes_nothing(make: Callable[[Any], Any], token: object) -> None:
    chain = Prefix(root_key(SECRET, FINGERPRINT), 4)
    chain.extend(TOKENS[:2])
    with pytest.raises((OverflowError, ValueError, TypeError)):
        chain.extend(make([2, 3, 4, token]))
    assert chain.tokens == 2
    chain.extend(TOKENS[2:])
    assert [key.hex() for key in chain.keys] == KEYS


@pytest.mark.parametrize(
    "tokens",
    [b"\0\1\2\3", bytearray(4), np.array([1.0, 2.5]), np.array([[1, 2], [3, 4]]), np.array([True]), np.array(3)],
    ids=["bytes", "bytearray", "floats", "table", "truth values", "scalar"],
)
def test_other_types_than_integers_are_refused(tokens: Any) -> None:
    with pytest.raises(TypeError, match="token ids must be"):
        Prefix(root_key(SECRET, FINGERPRINT), 4).extend(tokens)


@given(st.lists(token_ids, min_size=1, max_size=40), st.data())
def test_a_changed_token_changes_every_later_key_and_no_earlier(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] = data.draw(token_ids.filter(lambda token: token != tokens[at]))
    for index, (key, changed) in enumerate(zip(keys_of(tokens), keys_of(other), strict=True)):
        assert (key != changed) == (index >= at // 4)


@given(
    st.integers(0, 4),
    st.lists(st.binary(max_size=4), max_size=3),
    st.lists(st.binary(max_size=4), max_size=3),
)
def test_changed_extras_change_every_later_key_and_no_earlier(at: int, some: list[bytes], other: list[bytes]) -> None:
    tokens = list(range(20))
    with_some, with_other = keys_of(tokens, extras={at: some}), keys_of(tokens, extras={at: other})
    for index, (key, changed) in enumerate(zip(with_some, with_other, strict=True)):
        assert (key != changed) == (some != other and index >= at)


def test_extras_that_are_not_bytes() -> None:
    """Extras that are not bytes are refused before anything is hashed."""
    wrong: Any = {1: ["image"]}
    with pytest.raises(TypeError):
        Prefix(root_key(SECRET, FINGERPRINT), 4, wrong)


@pytest.mark.parametrize("secret", [bytes(65), bytes(1000)])
def test_a_secret_longer_than_the_hash_takes_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="64"):
        root_key(secret, FINGERPRINT)


@pytest.mark.parametrize("full", [0, 1, 2])
def test_the_tail_key_is_the_golden_vector(full: int) -> None:
    chain = Prefix(root_key(SECRET, FINGERPRINT), 4, {1: [b"image"]})
    chain.extend(TOKENS[: 4 * full])
    tail = TOKENS[4 * full : 4 * full + 3]
    parent = chain.keys[full - 1] if full else chain.root
    extra = len(b"image").to_bytes(4, "little") + b"image" if full == 1 else b""
    body = parent + (3).to_bytes(4, "little") + array("I", tail).tobytes() + extra
    assert chain.tail_key(full, tail) == hashlib.blake2b(body, digest_size=32, person=b"tail").digest()
    assert chain.keys == keys_of(TOKENS[: 4 * full], extras={1: [b"image"]}), "the chain is unchanged"


def test_a_tail_key_is_no_other_key() -> None:
    """Tails of other lengths, of other prompts and full segments have other keys."""
    chain = Prefix(root_key(SECRET, FINGERPRINT), 4)
    chain.extend(TOKENS)
    found = [chain.tail_key(at, [0] * count) for at in range(4) for count in range(1, 4)]
    found += [chain.tail_key(2, [0, 0, 1]), *chain.keys]
    assert len(set(found)) == len(found)
    for tokens in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="1 to 3 tokens"):
            chain.tail_key(2, tokens)
