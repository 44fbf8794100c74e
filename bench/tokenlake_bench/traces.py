"""Mooncake's trace format: JSON lines, plain (`.jsonl`) or compressed (`.jsonl.gz`, `.jsonl.zst`).

A line has `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id per started block; equal
ids mean equal prefixes up to and including that block. A block has `block_size` tokens, which is the same in all lines,
or 512 where a line does not name it. The file does not contain the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.mixing import WORD, key_of, mix64
from tokenlake_bench.trace_lines import TraceError, decoded
from tokenlake_bench.workload import VOCABULARY, Request, stream_tokens

BLOCK_TOKENS: Final = 512
"""Tokens of a block where the lines do not name its size."""

_NO_OUTPUT: Final = np.empty(0, dtype=np.uint32)


class _Line(msgspec.Struct, gc=False):
    """The fields of one line of Mooncake's format that are used; others are ignored."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]]
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] = BLOCK_TOKENS


class _TraceRequest(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    conversation: int
    length: int
    output_length: int
    block_ids: NDArray[np.uint64]


class MooncakeTrace:
    """A trace in Mooncake's format as a workload that knows its segments without computing tokens."""

    def __init__(self, name: str, requests: list[_TraceRequest], seed: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self._requests = requests
        self._key = np.array([key_of(seed & WORD)], dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Request:
        request = self._requests[index]
        keys = mix64(mix64(request.block_ids) + self._key)
        tokens = stream_tokens(keys, self.block_tokens, VOCABULARY).reshape(-1)[: request.length]
        return Request(index, request.at_s, request.conversation, tokens, _NO_OUTPUT)

    def accesses(self, segment_tokens: int = BLOCK_TOKENS) -> Accesses:
        """Returns the trace's requests, each with the ids of its full segments of `segment_tokens` tokens.

        A segment that ends within a block counts as shared only with prompts that share that whole block. With segments
        of a multiple of the block this is exact; otherwise a request's hits are too low by less than one block. Raises
        ConfigurationError for a segment of less than one token.
        """
        if segment_tokens < 1:
            raise ConfigurationError("segment_tokens", segment_tokens, "at least 1")
        several = segment_tokens < self.block_tokens
        ids: dict[int | tuple[int, int], int] = {}
        prompts: list[Prompt] = []
        for request in self._requests:
            ends = np.arange(1, request.length // segment_tokens + 1) * segment_tokens
            blocks = request.block_ids[-(-ends // self.block_tokens) - 1].tolist()
            # A block in which several segments end names each of them by its number.
            names = zip(blocks, range(len(blocks)), strict=True) if several else blocks
            chain = tuple(ids.setdefault(name, len(ids)) for name in names)
            prompts.append(Prompt(request.length, chain, request.at_s, request.output_length, request.conversation))
        return Accesses(segment_tokens, prompts)


def read_mooncake(
    path: Path | str,
    *,
    limit: int | None = None,
    seed: int = 0,
    jitter_s: float = 0.0,
) -> MooncakeTrace:
    """The trace at `path`, or its first `limit` requests.

    Token ids are a function of (`seed`, block id, position), below `VOCABULARY`; the last block is cut to
    `input_length`. `output_tokens` is empty. `jitter_s` > 0 adds an even, seeded delay in [0, jitter_s) to each arrival
    and keeps the order, for traces whose timestamps are rounded. `conversation` is inferred: a request whose prompt
    contains the last full block of an earlier prompt continues that conversation (the first 512 tokens, which all
    requests may share, do not count).

    Raises TraceError for a file that cannot be read, is empty, goes back in time, or has a malformed line;
    ConfigurationError for an argument out of range.
    """
    if limit is not None and limit < 1:
        raise ConfigurationError("limit", limit, "at least 1")
    if not 0 <= jitter_s < float("inf"):
        raise ConfigurationError("jitter_s", jitter_s, "a finite number of seconds, at least 0")
    path = Path(path)
    lines = _parse(path, limit)
    arrivals = _jittered([line.timestamp / 1_000 for line in lines], jitter_s, seed)
    block_tokens = lines[0].block_size
    conversations = _conversations(lines, block_tokens)
    requests = [
        _TraceRequest(
            at_s, conversation, line.input_length, line.output_length, np.array(line.hash_ids, dtype=np.uint64)
        )
        for at_s, conversation, line in zip(arrivals, conversations, lines, strict=True)
    ]
    return MooncakeTrace(path.name, requests, seed, block_tokens)


def _parse(path: Path, limit: int | None) -> list[_Line]:
    """The lines of the file in order of time, up to `limit`."""
    lines: list[_Line] = []
    earliest = 0.0
    for number, line in decoded(msgspec.json.Decoder(_Line), path):
        if line.timestamp < earliest:
            raise TraceError(path, f"timestamp: expected at least {earliest:g}, got {line.timestamp:g}", number)
        size = line.block_size
        if lines and size != lines[0].block_size:
            raise TraceError(
                path, f"block_size: expected {lines[0].block_size}, that of the first line; got {size}", number
            )
        blocks = -(-line.input_length // size)
        if len(line.hash_ids) != blocks:
            problem = f"hash_ids: expected {blocks}, one per started {size}-token block of the prompt"
            raise TraceError(path, f"{problem}; got {len(line.hash_ids)}", number)
        earliest = line.timestamp
        lines.append(line)
        if len(lines) == limit:
            break
    if not lines:
        raise TraceError(path, "expected at least one request; the file has none")
    return lines


def _conversations(lines: list[_Line], block_tokens: int) -> list[int]:
    common = max(1, BLOCK_TOKENS // block_tokens)
    ended_at: dict[int, int] = {}
    numbers: list[int] = []
    started = 0
    for line in lines:
        full = line.hash_ids[common : line.input_length // block_tokens]
        number = next((ended_at[block] for block in reversed(full) if block in ended_at), None)
        if number is None:
            number = started
            started += 1
        if full:
            ended_at[full[-1]] = number
        numbers.append(number)
    return numbers


def _jittered(arrivals: list[float], jitter_s: float, seed: int) -> list[float]:
    if jitter_s == 0:
        return arrivals
    rng = random.Random(seed)
    return sorted(at_s + rng.random() * jitter_s for at_s in arrivals)
