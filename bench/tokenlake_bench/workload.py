"""Workloads that benchmarks replay: requests in time order, each with its tokens, and a built-in workload.

Tokens are a function of (seed, stream, position), so a workload holds lengths only and computes the tokens of a request
when the iteration gets there. Iterating again gives the same requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake_bench.mixing import GOLDEN, WORD, key_of, mix64

Tokens = NDArray[np.uint32]

VOCABULARY: Final = 32_000
"""Token ids of workloads are below this number."""
BUILTIN_REQUESTS: Final = 240

_SYSTEM_STREAM: Final = 1
_TEXT_STREAM: Final = 2
_SYSTEM_PROMPTS: Final = 6
_USER_TOKENS: Final = (48, 192)
_ANSWER_TOKENS: Final = (48, 160)
_MEAN_GAP_S: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a workload: its prompt and when it arrives. The arrays are one-dimensional and belong to the
    caller that took the request from the workload.

    `index` counts from 0 in time order; `at_s` is the arrival in seconds of trace time; `conversation` is equal for the
    turns of one conversation; `output_tokens` is the answer, empty where the source does not have it.
    """

    index: int
    at_s: float
    conversation: int
    tokens: Tokens
    output_tokens: Tokens


class Workload(Protocol):
    """A sequence of requests in which `at_s` never decreases. Each iteration gives the same requests."""

    @property
    def name(self) -> str:
        """Name of the workload in reports."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def __getitem__(self, index: int) -> Request:
        """The request with this index, 0 to the length minus 1; its tokens are computed anew with each call."""
        ...


def stream_tokens(keys: NDArray[np.uint64], count: int, vocabulary: int) -> Tokens:
    """The first `count` random tokens of each stream in `keys` (shape [k]), as an array of shape [k, count] with values
    below `vocabulary`."""
    positions = np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN)
    words = mix64(keys[:, None] + positions[None, :])
    words >>= np.uint64(32)
    words *= np.uint64(vocabulary)
    words >>= np.uint64(32)
    return words.astype(np.uint32)


class _Conversation:
    """A conversation that is open: it is over once its next prompt would exceed its limit."""

    def __init__(self, rng: random.Random, number: int, lengths: list[int], prompt_tokens: tuple[int, int]) -> None:
        self._rng = rng
        self._number = number
        self._system = rng.choices(range(len(lengths)), [1 / rank for rank in range(1, len(lengths) + 1)])[0]
        self._system_length = lengths[self._system]
        low, high = prompt_tokens
        self._limit = rng.randint((low + high) // 2, high)
        self._text = rng.randint(*_USER_TOKENS)

    def next_turn(self, at_s: float) -> _Turn:
        answer = self._rng.randint(*_ANSWER_TOKENS)
        turn = _Turn(at_s, self._number, self._system, self._system_length, self._text, answer)
        self._text += answer + self._rng.randint(*_USER_TOKENS)
        return turn

    @property
    def over(self) -> bool:
        return self._system_length + self._text > self._limit


class _Turn(NamedTuple):
    """Lengths of one request, and the numbers of its conversation and of its system prompt. Its prompt is the first
    `system_length` tokens of the system prompt and the first `text_length` tokens of the conversation."""

    at_s: float
    conversation: int
    system: int
    system_length: int
    text_length: int
    answer_length: int


class BuiltinWorkload:
    """The built-in workload: conversations of several requests over shared system prompts. Lengths are in tokens.

    A conversation starts from one of six system prompts, drawn with weight 1 / rank, and a user text. It goes on until
    its next prompt would exceed its own limit, drawn from the upper half of `prompt_tokens`. `concurrent` conversations
    are open at any time; each request is the next turn of one of them, drawn evenly. The prompt of a request is the
    system prompt, all earlier user texts and answers, and a new user text. Answers are given by the workload
    (`output_tokens`) and not by the engine, so that every run has the same prompts.
    """

    def __init__(
        self,
        requests: int | None = None,
        seed: int = 0,
        *,
        vocabulary: int = VOCABULARY,
        prompt_tokens: tuple[int, int] = (600, 2_500),
        concurrent: int = 12,
    ) -> None:
        self.name = f"built-in conversations (seed {seed})"
        self._seed = seed
        self._vocabulary = vocabulary
        rng = random.Random(seed)
        low, high = prompt_tokens
        shortest = low - _USER_TOKENS[0]
        lengths = [rng.randint(shortest, shortest + (high - low) // 4) for _ in range(_SYSTEM_PROMPTS)]
        numbers = itertools.count()
        under_way = [_Conversation(rng, next(numbers), lengths, prompt_tokens) for _ in range(concurrent)]
        self._turns: list[_Turn] = []
        at_s = 0.0
        for _ in range(BUILTIN_REQUESTS if requests is None else requests):
            chosen = rng.randrange(concurrent)
            self._turns.append(under_way[chosen].next_turn(at_s))
            if under_way[chosen].over:
                under_way[chosen] = _Conversation(rng, next(numbers), lengths, prompt_tokens)
            at_s += -_MEAN_GAP_S * np.log1p(-rng.random()).item()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Request:
        turn = self._turns[index]
        system = self._stream(_SYSTEM_STREAM, turn.system, turn.system_length)
        text = self._stream(_TEXT_STREAM, turn.conversation, turn.text_length + turn.answer_length)
        prompt = np.concatenate([system, text[: turn.text_length]])
        return Request(index, turn.at_s, turn.conversation, prompt, text[turn.text_length :])

    def _stream(self, kind: int, number: int, count: int) -> Tokens:
        key = np.array([key_of(self._seed & WORD, kind, number)], dtype=np.uint64)
        return stream_tokens(key, count, self._vocabulary).reshape(-1)
