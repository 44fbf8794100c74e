"""Mooncake's format: tokens follow from block ids, and the error of a bad line names it."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import infinite_cache, intern_segments
from tokenlake_bench.trace_formats import read_trace
from tokenlake_bench.trace_lines import TraceError
from tokenlake_bench.traces import read_mooncake
from tokenlake_bench.workload import Request

GOOD = {"timestamp": 0, "input_length": 1_000, "output_length": 5, "hash_ids": [0, 1]}


def line(at_ms: float, length: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 5, "hash_ids": ids}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(each) + "\n" for each in lines).encode()
    packed = {".zst": zstandard.compress(text), ".gz": gzip.compress(text)}
    path.write_bytes(packed.get(path.suffix, text))
    return path


def read(tmp_path: Path, lines: list[dict[str, Any]], **arguments: Any) -> list[Request]:
    return list(read_mooncake(write(tmp_path / "trace.jsonl", lines), **arguments))


def test_equal_ids_give_equal_tokens_and_the_last_block_is_cut(tmp_path: Path) -> None:
    requests = read(tmp_path, [line(0, 1_000, [7, 8]), line(1_500, 1_030, [7, 9, 10]), line(1_500, 1_024, [7, 8])])
    first, second, third = (request.tokens for request in requests)
    assert [len(each) for each in (first, second, third)] == [1_000, 1_030, 1_024]
    assert [request.at_s for request in requests] == [0.0, 1.5, 1.5]
    assert [request.index for request in requests] == [0, 1, 2]
    assert all(len(request.output_tokens) == 0 for request in requests)
    assert first.dtype == np.uint32
    assert np.array_equal(first[:512], second[:512])
    assert np.array_equal(first, third[:1_000])
    assert not np.array_equal(first[512:], second[512:1_000])


def test_the_seed_decides_the_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [GOOD])
    tokens = [next(iter(read_mooncake(path, seed=seed))).tokens for seed in (0, 0, 1)]
    assert np.array_equal(tokens[0], tokens[1])
    assert not np.array_equal(tokens[0], tokens[2])
    assert tokens[0].max() < 32_000


def test_compressed_and_plain_files_read_alike(tmp_path: Path) -> None:
    lines = [line(number, 512 * 40, list(range(number, number + 40))) for number in range(500)]
    plain = read_mooncake(write(tmp_path / "trace.jsonl", lines))
    for name in ("trace.jsonl.zst", "trace.jsonl.gz"):
        packed = read_mooncake(write(tmp_path / name, lines))
        assert len(plain) == len(packed) == 500
        for a, b in zip(plain, packed, strict=True):
            assert a.at_s == b.at_s
            assert np.array_equal(a.tokens, b.tokens)


def test_empty_lines_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + json.dumps(GOOD | {"chat_id": 3}) + "\r\n\n" + json.dumps(GOOD))
    assert len(read_mooncake(path)) == 2


def test_jitter_keeps_the_order_and_is_repeatable(tmp_path: Path) -> None:
    lines = [line(3_000 * (number // 10), 600, [number, number + 100]) for number in range(40)]
    plain = read(tmp_path, lines)
    moved, again = (read(tmp_path, lines, jitter_s=3.0, seed=4) for _ in range(2))
    arrivals = [request.at_s for request in moved]
    assert arrivals == sorted(arrivals) == [request.at_s for request in again]
    assert all(0 <= b.at_s - a.at_s < 3 for a, b in zip(plain, moved, strict=True))
    assert len(set(arrivals)) == 40


def test_a_conversation_goes_on_from_its_last_full_block(tmp_path: Path) -> None:
    lines = [
        line(0, 1_100, [0, 1, 2]),
        line(0, 1_100, [0, 3, 4]),
        line(1, 1_600, [0, 1, 5, 6]),
        line(2, 600, [0, 7]),
        line(3, 2_100, [0, 1, 5, 8, 9]),
        line(4, 600, [0, 10]),
    ]
    assert [request.conversation for request in read(tmp_path, lines)] == [0, 1, 0, 2, 0, 3]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"timestamp": "0"}, "Expected `float`, got `str` - at `$.timestamp`"),
        ({"timestamp": -1}, "Expected `float` >= 0.0 - at `$.timestamp`"),
        ({"input_length": 0}, "Expected `int` >= 1 - at `$.input_length`"),
        ({"output_length": -3}, "Expected `int` >= 0 - at `$.output_length`"),
        ({"hash_ids": [0, -1]}, "Expected `int` >= 0 - at `$.hash_ids[1]`"),
        ({"hash_ids": [0]}, "hash_ids: expected 2"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids: expected 2"),
    ],
)
def test_a_bad_value_names_file_line_and_field(tmp_path: Path, bad: dict[str, Any], expected: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, [GOOD, GOOD | bad])
    assert str(caught.value).startswith(f"{tmp_path / 'trace.jsonl'}, line 2: {expected}")


def test_time_does_not_go_back(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: timestamp: expected at least 10, got 9"):
        read(tmp_path, [line(10, 600, [0, 1]), line(9, 600, [0, 1])])


@pytest.mark.parametrize("text", [b"{", b"[1, 2]", b"nonsense", b'{"timestamp": 1', b"\xff\xfe"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + text)
    with pytest.raises(TraceError, match="line 2: "):
        read_mooncake(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    files = {
        "other.jsonl.zst": (b"not compressed at all", "expected zstd data"),
        "empty.jsonl": (b"", "at least one request"),
        "empty.jsonl.zst": (b"", "at least one request"),
        "other.jsonl.gz": (b"not compressed at all", "expected gzip data"),
        "cut.jsonl.gz": (gzip.compress(json.dumps(GOOD).encode() * 50)[:-9], "expected gzip data"),
        "trace.csv": (b"a,b", "Mooncake's format or of coding-agent sessions, in a file named .jsonl, .jsonl.gz"),
    }
    for name, (content, problem) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError) as caught:
            read_mooncake(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert problem in str(caught.value)
    with pytest.raises(TraceError, match="No such file"):
        read_mooncake(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(("field", "value"), [("limit", 0), ("jitter_s", -1.0)])
def test_an_argument_out_of_range_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=field):
        read(tmp_path, [GOOD], **{field: value})


# -- block sizes


def blocks(text: str, size: int) -> dict[str, Any]:
    """A request whose prompt has 64 tokens per letter, with blocks of `size` tokens: an id per started one, and equal
    ids for equal prefixes."""
    length = 64 * len(text)
    ends = [min(length, end) for end in range(size, length + size, size)]
    ids = [int.from_bytes(hashlib.sha256(f"{text[: -(-end // 64)]} {end}".encode()).digest()[:6]) for end in ends]
    return {"timestamp": 0, "input_length": length, "output_length": 5, "hash_ids": ids, "block_size": size}


TEXTS = [
    "aaaaaaaaaaaaaaaaaaaabb",
    "aaaaaaaaaaaaaaaabbbb",
    "aaaaaaaaaaaaaaaaaaaabbbbbb",
    "bbbbbbbb",
    "aaaaaaaaab",
    "aaaaaaaaac",
]


@pytest.mark.parametrize("segment", [16, 100, 192, 256, 512, 700])
@pytest.mark.parametrize("size", [16, 64, 192, 512])
def test_segments_of_any_size_are_told_apart_as_tokens(tmp_path: Path, size: int, segment: int) -> None:
    """The ids of segments are those that the tokens give, for every size of blocks and of segments."""
    trace = read_mooncake(write(tmp_path / "trace.jsonl", [blocks(text, size) for text in TEXTS]))
    assert (
        trace.accesses(segment).prompts
        == intern_segments(
            (dataclasses.replace(each, output_tokens=np.zeros(5, dtype=np.uint32)) for each in trace), segment
        ).prompts
    )


@pytest.mark.parametrize("segment", [256, 512, 1024])
def test_block_sizes_differ_by_rounding_alone(tmp_path: Path, segment: int) -> None:
    """The same requests with blocks of 16 and of 512 tokens share the same segments where both divide them, and at
    most one block less per request where they do not."""
    fine, coarse = (
        read_mooncake(write(tmp_path / f"{size}.jsonl", [blocks(text, size) for text in TEXTS])).accesses(segment)
        for size in (16, 512)
    )
    hits = [infinite_cache(each).hit_tokens for each in (fine, coarse)]
    if segment % 512 == 0:
        assert [prompt.chain for prompt in fine.prompts] == [prompt.chain for prompt in coarse.prompts]
    assert 0 <= hits[0] - hits[1] < 512 * len(TEXTS)
    assert hits[0] > 0


def test_a_file_has_one_block_size(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: block_size: expected 16, that of the first line; got 512"):
        read(tmp_path, [blocks("a", 16), GOOD])
    with pytest.raises(TraceError, match="line 1: hash_ids: expected 63, one per started 16-token block"):
        read(tmp_path, [GOOD | {"block_size": 16}])


def test_only_times_of_traces_without_a_block_size_are_spread(tmp_path: Path) -> None:
    lines = [line(3_000, 600, [number, number + 100]) for number in range(9)]
    rounded = read_trace(write(tmp_path / "a.jsonl", lines), jitter_s=3.0)
    assert len({request.at_s for request in rounded}) == 9
    exact = [each | {"block_size": 512} for each in lines]
    assert {request.at_s for request in read_trace(write(tmp_path / "b.jsonl", exact), jitter_s=3.0)} == {3.0}


def test_conversations_go_on_with_any_block_size(tmp_path: Path) -> None:
    texts = ["aaaaaaaabb", "aaaaaaaacc", "aaaaaaaabbdd", "aaaaaaaaee"]
    for size in (16, 64, 512):
        assert [each.conversation for each in read(tmp_path, [blocks(text, size) for text in texts])][2] == (
            0 if size < 512 else 2
        ), "the first 512 tokens are common to all"
