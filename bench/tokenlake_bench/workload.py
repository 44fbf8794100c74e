"""Workloads that benchmarks replay: requests in time order, each with its tokens, and a built-in workload.

Tokens are a function of (seed, stream, position), so a workload holds lengths only and computes the tokens of a request
when the iteration gets there. Iterating again gives the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake_bench.mixing import GOLDEN, WORD, key_of, mix64

Tokens = NDArray[np.uint32]

_SYSTEM_STREAM: Final = 1
_TEXT_STREAM: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a workload: its prompt and when it arrives. The arrays are one-dimensional and belong to the
    caller that took the request from the workload.

    `index` counts from 0 in time order; `at_s` is the arrival in seconds of trace time; `conversation` is equal for the
    turns of one conversation; `output_tokens` is the answer, empty where the source does not have it. `follows` and
    `pause_s` are those of a `Turn`.
    """

    index: int
    at_s: float
    conversation: int
    tokens: Tokens
    output_tokens: Tokens
    follows: int | None = None
    pause_s: float = 0.0


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


def check_vocabulary(vocabulary: int) -> None:
    """Check that token ids below `vocabulary` fit a uint32. Raises ConfigurationError if not."""
    if not 2 <= vocabulary <= 1 << 32:
        raise ConfigurationError("vocabulary", vocabulary, "2 to 2**32")


@dataclass(frozen=True, kw_only=True)
class BuiltinSettings:
    """Parameters of the built-in workload. Lengths are in tokens, ranges include both ends; a field out of range raises
    ConfigurationError.

    A conversation starts from a system prompt, drawn with weight 1 / rank**zipf, and a user text. It goes on
    until its next prompt would exceed its own limit, drawn from the upper half of `prompt_tokens`.
    `concurrent` conversations are open at any time; each request is the next turn of one of them, drawn
    evenly.
    """

    requests: int = 240
    seed: int = 0
    vocabulary: int = 32_000
    prompt_tokens: tuple[int, int] = (600, 2_500)
    user_tokens: tuple[int, int] = (48, 192)
    answer_tokens: tuple[int, int] = (48, 160)
    system_prompts: int = 6
    zipf: float = 1.0
    concurrent: int = 12
    mean_gap_s: float = 0.5

    def __post_init__(self) -> None:
        for field in ("requests", "system_prompts", "concurrent"):
            if getattr(self, field) < 1:
                raise ConfigurationError(field, getattr(self, field), "at least 1")
        for field in ("prompt_tokens", "user_tokens", "answer_tokens"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise ConfigurationError(field, (low, high), "1 <= shortest <= longest")
        for field in ("zipf", "mean_gap_s"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigurationError(field, getattr(self, field), "a finite number, at least 0")
        check_vocabulary(self.vocabulary)
        if self.user_tokens[0] >= self.prompt_tokens[0]:
            raise ConfigurationError("user_tokens", self.user_tokens, "shorter than the shortest prompt")
        longest = self.system_tokens[1] + self.user_tokens[1]
        if longest > self.prompt_tokens[1]:
            raise ConfigurationError(
                "prompt_tokens", self.prompt_tokens, f"room for a first prompt of {longest} tokens"
            )

    @property
    def system_tokens(self) -> tuple[int, int]:
        """(shortest, longest) length in tokens of the system prompts. It varies by a quarter of the range of
        `prompt_tokens`."""
        low, high = self.prompt_tokens
        shortest = low - self.user_tokens[0]
        return shortest, shortest + (high - low) // 4


@dataclass(frozen=True, slots=True)
class _Turn:
    """Lengths of one request, and the indices of its conversation and of its system prompt. Its prompt is
    the first `system_length` tokens of the system prompt and the first `text_length` tokens of the conversation."""

    at_s: float
    conversation: int
    system: int
    system_length: int
    text_length: int
    answer_length: int


class _Conversation:
    """A conversation that is open: it is over once its next prompt would exceed its limit."""

    def __init__(self, settings: BuiltinSettings, rng: random.Random, number: int, lengths: list[int]) -> None:
        self._settings = settings
        self._rng = rng
        self._number = number
        weights = [rank**-settings.zipf for rank in range(1, len(lengths) + 1)]
        self._system = rng.choices(range(len(lengths)), weights)[0]
        self._system_length = lengths[self._system]
        low, high = settings.prompt_tokens
        self._limit = rng.randint((low + high) // 2, high)
        self._text = rng.randint(*settings.user_tokens)

    def next_turn(self, at_s: float) -> _Turn:
        answer = self._rng.randint(*self._settings.answer_tokens)
        turn = _Turn(at_s, self._number, self._system, self._system_length, self._text, answer)
        self._text += answer + self._rng.randint(*self._settings.user_tokens)
        return turn

    @property
    def over(self) -> bool:
        return self._system_length + self._text > self._limit


class _BuiltinWorkload:
    def __init__(self, settings: BuiltinSettings) -> None:
        self._settings = settings
        self._turns = _schedule(settings)

    @property
    def name(self) -> str:
        return f"built-in conversations (seed {self._settings.seed})"

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
        key = np.array([key_of(self._settings.seed & WORD, kind, number)], dtype=np.uint64)
        return stream_tokens(key, count, self._settings.vocabulary).reshape(-1)


def _schedule(settings: BuiltinSettings) -> list[_Turn]:
    rng = random.Random(settings.seed)
    lengths = [rng.randint(*settings.system_tokens) for _ in range(settings.system_prompts)]
    open_conversations = [_Conversation(settings, rng, number, lengths) for number in range(settings.concurrent)]
    started = settings.concurrent
    turns: list[_Turn] = []
    at_s = 0.0
    while len(turns) < settings.requests:
        chosen = rng.randrange(settings.concurrent)
        turns.append(open_conversations[chosen].next_turn(at_s))
        if open_conversations[chosen].over:
            open_conversations[chosen] = _Conversation(settings, rng, started, lengths)
            started += 1
        at_s += -settings.mean_gap_s * np.log1p(-rng.random()).item()
    return turns


def builtin_workload(settings: BuiltinSettings | None = None) -> Workload:
    """The built-in workload: conversations of several requests over shared system prompts.

    The prompt of each request is the system prompt, all earlier user texts and answers, and a new user text. Answers
    are given by the workload (`output_tokens`) and not by the engine, so that every run has the same prompts.
    """
    return _BuiltinWorkload(settings or BuiltinSettings())
