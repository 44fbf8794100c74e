"""Sessions of a coding agent, as published by kv-cache-tester: JSON lines, plain or compressed, one session per line.

A session has requests `t` (seconds from its start), `in`, `out` (tokens), `hash_ids` (ids of the full 64-token blocks
of the prompt, as text: "1-3,7" is 1, 2, 3, 7), and sub-agents, whose requests lie one level deeper with times of their
own; other fields are not used. Ids are local to the session; sessions that are not `primary` are copies and left out.
The file has no start times of sessions; they are drawn as a Poisson process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError
from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.mixing import WORD, key_of, mix64
from tokenlake_bench.trace_lines import TraceError, explain, refuse_beyond_share, text_lines
from tokenlake_bench.workload import Request, check_vocabulary, stream_tokens

__all__ = ["BLOCK_TOKENS", "SESSIONS_PER_HOUR", "SessionTrace", "read_sessions"]

BLOCK_TOKENS: Final = 64
SESSIONS_PER_HOUR: Final = 24.0
"""Sessions that start per hour by default. Some 20 are then open at a time, and an LRU cache of 0.5, 1 and 3 million
tokens finds 28, 58 and 92 % of the tokens."""

_MAX_PROMPT: Final = 1 << 24
_MAX_RANGE_TEXT: Final = 32
_NO_IDS: Final = np.empty(0, dtype=np.int64)
_TEXT_STREAM: Final = 1
_TAIL_STREAM: Final = 2
_KINDS: Final = {
    "primary": "true or false",
    "t": "a number of seconds",
    "hash_ids": "block ids as text",
    "requests": "a list of requests",
}

_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Entry(msgspec.Struct, gc=False):
    """A request, or a sub-agent, which has requests and no prompt."""

    t: _Seconds
    prompt: Annotated[int, Meta(ge=1, le=_MAX_PROMPT)] = msgspec.field(name="in", default=0)
    output: Annotated[int, Meta(ge=0)] = msgspec.field(name="out", default=0)
    hash_ids: str | None = None
    requests: list[_Entry] | None = None


class _Line(msgspec.Struct, gc=False):
    """The fields of one line that are used; others are ignored."""

    primary: bool
    block_size: int
    requests: list[_Entry]


class SessionRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. `conversation` is the agent: a session has one, and one more per sub-agent."""

    at_s: float
    session: int
    conversation: int
    length: int
    output_length: int
    block_ids: NDArray[np.int64]
    """Block ids, local to the session."""


class SessionTrace:
    """A `TraceSource`."""

    def __init__(
        self, name: str, requests: list[SessionRequest], malformed: list[TraceError], seed: int, vocabulary: int
    ) -> None:
        self.requests = requests
        """In time order."""
        self.malformed = malformed
        """Errors of the lines that were skipped."""
        self._name = name
        self._seed = seed
        self._vocabulary = vocabulary

    @property
    def name(self) -> str:
        """See `Workload`."""
        return self._name

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        no_output = np.empty(0, dtype=np.uint32)
        for index, request in enumerate(self.requests):
            key = key_of(self._seed & WORD, _TEXT_STREAM, request.session)
            blocks = self._stream(mix64(mix64(request.block_ids.astype(np.uint64)) + np.uint64(key)), BLOCK_TOKENS)
            # The trace has no id for the tokens behind the last full block: they get values unique to this request.
            tail = np.array([key_of(self._seed & WORD, _TAIL_STREAM, index)], dtype=np.uint64)
            tokens = np.concatenate([blocks, self._stream(tail, request.length % BLOCK_TOKENS)])
            yield Request(index, request.at_s, request.conversation, tokens, no_output)

    def accesses(self, segment_tokens: int = 512) -> Accesses:
        """See `TraceSource`; `segment_tokens` is a multiple of 64."""
        if segment_tokens < 1 or segment_tokens % BLOCK_TOKENS:
            raise ConfigurationError("segment_tokens", segment_tokens, f"a multiple of {BLOCK_TOKENS}, the trace's own")
        chains = _Chains(segment_tokens // BLOCK_TOKENS)
        prompts = [
            Prompt(
                request.length,
                chains.chain(request.session, request.block_ids),
                request.at_s,
                request.output_length,
                request.conversation,
            )
            for request in self.requests
        ]
        return Accesses(segment_tokens, prompts)

    def _stream(self, keys: NDArray[np.uint64], count: int) -> NDArray[np.uint32]:
        return stream_tokens(keys, count, self._vocabulary).reshape(-1)


class _Chains:
    """Assigns ids to segments: two segments get the same id if all blocks up to their ends are equal."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._ids: dict[tuple[int, bytes], int] = {}
        """Segment ids by (id of the previous segment, block ids of the segment); for a session's first segment the
        previous id is -1 minus the session's number."""
        self._last: dict[int, tuple[NDArray[np.int64], tuple[int, ...]]] = {}

    def chain(self, session: int, ids: NDArray[np.int64]) -> tuple[int, ...]:
        """Segment ids of a prompt. The prefix shared with the session's previous prompt is not looked up again."""
        previous, known = self._last.get(session, (ids[:0], ()))
        common = min(len(ids), len(previous))
        unequal = np.flatnonzero(ids[:common] != previous[:common])
        common = int(unequal[0]) if len(unequal) else common
        chain = list(known[: common // self._blocks])
        for start in range(len(chain) * self._blocks, len(ids) - self._blocks + 1, self._blocks):
            before = chain[-1] if chain else -1 - session
            key = (before, ids[start : start + self._blocks].tobytes())
            chain.append(self._ids.setdefault(key, len(self._ids)))
        self._last[session] = ids, tuple(chain)
        return self._last[session][1]


def read_sessions(
    path: Path | str,
    *,
    limit: int | None = None,
    seed: int = 0,
    vocabulary: int = 32_000,
    sessions_per_hour: float = SESSIONS_PER_HOUR,
) -> SessionTrace:
    """The sessions at `path`, in the file's order, started by a Poisson process that `seed` draws; or the first `limit`
    requests of them.

    Token ids are a function of (`seed`, session, block id, position), below `vocabulary`; those behind the last full
    block are unique to the request. A malformed line is skipped and counted.

    Raises TraceError for a file that cannot be read, has no session, or more malformed lines than `MALFORMED_SHARE`;
    ConfigurationError for an argument out of range.
    """
    if limit is not None and limit < 1:
        raise ConfigurationError("limit", limit, "at least 1")
    if not 0 < sessions_per_hour < float("inf"):
        raise ConfigurationError("sessions_per_hour", sessions_per_hour, "a finite number above 0")
    check_vocabulary(vocabulary)
    path = Path(path)
    sessions, malformed = _parse(path)
    rng = random.Random(seed)
    at_s = 0.0
    agents = 0
    requests: list[SessionRequest] = []
    for number, session in enumerate(sessions):
        at_s += rng.expovariate(sessions_per_hour / 3600)
        requests += (
            msgspec.structs.replace(
                request, at_s=at_s + request.at_s, session=number, conversation=agents + request.conversation
            )
            for request in session
        )
        agents += 1 + max(request.conversation for request in session)
    requests.sort(key=lambda request: request.at_s)
    return SessionTrace(path.name, requests[:limit], malformed, seed, vocabulary)


def _parse(path: Path) -> tuple[list[list[SessionRequest]], list[TraceError]]:
    """Sessions with times from their own start, and the errors of malformed lines."""
    decoder = msgspec.json.Decoder(_Line)
    sessions: list[list[SessionRequest]] = []
    malformed: list[TraceError] = []
    lines = 0
    for number, text in enumerate(text_lines(path), start=1):
        if not text.strip():
            continue
        lines += 1
        try:
            session = _session(decoder, text, path, number)
        except TraceError as error:
            malformed.append(error)
            continue
        if session:
            sessions.append(session)
    refuse_beyond_share(path, malformed, lines)
    if not sessions:
        raise TraceError(path, "expected at least one session that is primary; the file has none")
    return sessions, malformed


def _session(decoder: msgspec.json.Decoder[_Line], text: bytes, path: Path, number: int) -> list[SessionRequest]:
    """The requests of one line; none for a copy. Raises TraceError."""
    try:
        line = decoder.decode(text)
        if line.block_size != BLOCK_TOKENS:
            raise _Malformed(f"expected {BLOCK_TOKENS}, got {line.block_size}", "block_size")
        return list(_requests(line.requests, 0.0, itertools.count())) if line.primary else []
    except _Malformed as error:
        raise TraceError(path, error.problem, number, error.field) from None
    except msgspec.ValidationError as error:
        problem, field = explain(str(error), _KINDS)
        raise TraceError(path, problem, number, field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, f"expected one JSON object; {error}", number) from None
    except RecursionError:
        raise TraceError(path, "expected sub-agents few levels deep", number, "requests") from None


class _Malformed(Exception):
    def __init__(self, problem: str, field: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.field = field


def _requests(entries: Iterable[_Entry], start_s: float, agents: Iterator[int]) -> Iterator[SessionRequest]:
    """Requests of one agent and of its sub-agents; each agent takes the next number."""
    agent = next(agents)
    earliest = 0.0
    for entry in entries:
        if entry.t < earliest:
            raise _Malformed(f"expected at least {earliest:g}, the request before; got {entry.t:g}", "t")
        earliest = entry.t
        if entry.requests is not None:
            yield from _requests(entry.requests, start_s + entry.t, agents)
        if entry.hash_ids is not None:
            yield SessionRequest(
                at_s=start_s + entry.t,
                session=0,
                conversation=agent,
                length=entry.prompt,
                output_length=entry.output,
                block_ids=_expand(entry.hash_ids, entry.prompt // BLOCK_TOKENS),
            )


def _expand(text: str, blocks: int) -> NDArray[np.int64]:
    """The block ids of `text`, such as "1-3,7"; there must be `blocks` of them."""
    ranges: list[tuple[int, int]] = []
    count = 0
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        last = last or first
        if len(part) > _MAX_RANGE_TEXT or not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _Malformed(
                f"expected ids and ranges of ids as in '1-3,7'; got '{part[:_MAX_RANGE_TEXT]}'", "hash_ids"
            )
        count += int(last) - int(first) + 1
        if count > blocks:
            break
        ranges.append((int(first), int(last)))
    if count != blocks:
        raise _Malformed(f"expected {blocks} ids, one per full {BLOCK_TOKENS}-token block; got {count}", "hash_ids")
    return np.concatenate([np.arange(first, last + 1, dtype=np.int64) for first, last in ranges] or [_NO_IDS])
