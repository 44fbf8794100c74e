"""Sessions of a coding agent, as published by kv-cache-tester: JSON lines, plain or compressed, one session per line.

A session has requests `t` (seconds from its start), `in`, `out` (tokens), `hash_ids` (ids of the full 64-token blocks
of the prompt, as text: "1-3,7" is 1, 2, 3, 7), `api_time` (seconds to the answer's end), and sub-agents, whose requests
lie one level deeper with times of their own; other fields are not used. Ids are local to the session; sessions that are
not `primary` are copies and left out. The file has no start times of sessions; they are drawn as a Poisson
process.

Each request but a session's first ones follows another one, as a `Turn`: an agent's next request follows its previous
one, and a sub-agent's first request follows the last request that its parent sent before. The pause is the recorded
time from the end of the answer to the request, at least 0, because a few answers end just after the next request began.
A request without `api_time` (one in ten) counts as answered at once, so that the pause behind it is the whole time
between the two requests. `t` of a sub-agent with a `duration_ms` is the time at which it ended: its pause ends
`duration_ms` earlier. Its parent's next request does not wait for it, but the parent's pause contains the sub-agent's
recorded duration.
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
from tokenlake_bench.trace_lines import TraceError, decoded
from tokenlake_bench.workload import VOCABULARY, Request, stream_tokens

BLOCK_TOKENS: Final = 64
SESSIONS_PER_HOUR: Final = 24.0
"""Default number of sessions that start per hour. Some 20 are then open at a time, and an LRU cache of 0.5, 1 and 3
million tokens finds 28, 58 and 92 % of the tokens."""

_MAX_PROMPT: Final = 1 << 24
_MAX_RANGE_TEXT: Final = 32
_NO_IDS: Final = np.empty(0, dtype=np.int64)
_NO_OUTPUT: Final = np.empty(0, dtype=np.uint32)
_TEXT_STREAM: Final = 1
_TAIL_STREAM: Final = 2

_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Entry(msgspec.Struct, gc=False):
    """An entry of a recorded session: a request, or a sub-agent, which has requests of its own and no prompt."""

    t: _Seconds
    prompt: Annotated[int, Meta(ge=1, le=_MAX_PROMPT)] = msgspec.field(name="in", default=0)
    output: Annotated[int, Meta(ge=0)] = msgspec.field(name="out", default=0)
    hash_ids: str | None = None
    api_time: _Seconds | None = None
    duration_ms: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    requests: list[_Entry] | None = None


class _Line(msgspec.Struct, gc=False):
    """The fields of one line of the file that are used; others are ignored."""

    primary: bool
    block_size: int
    requests: list[_Entry]


class SessionRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a recorded session. `conversation` is the number of the agent: a session has one agent, and one
    more per sub-agent."""

    at_s: float
    session: int
    conversation: int
    length: int
    output_length: int
    block_ids: NDArray[np.int64]
    """Ids of the full 64-token blocks of the prompt; they identify blocks within the session only."""
    follows: int | None = None
    pause_s: float = 0.0
    """`follows`: number of the request whose answer this one waits for, or None. `pause_s`: seconds from that answer to
    this request."""


class SessionTrace:
    """Recorded coding-agent sessions as a workload that knows its segments without computing tokens."""

    def __init__(self, name: str, requests: list[SessionRequest], seed: int) -> None:
        self.requests = requests
        """The requests of all sessions in order of time."""
        self.name = name
        self._seed = seed

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Request:
        request = self.requests[index]
        key = key_of(self._seed & WORD, _TEXT_STREAM, request.session)
        blocks = self._stream(mix64(mix64(request.block_ids.astype(np.uint64)) + np.uint64(key)), BLOCK_TOKENS)
        # The tokens behind the last full block have no id: they are unique to this request.
        tail = np.array([key_of(self._seed & WORD, _TAIL_STREAM, index)], dtype=np.uint64)
        tokens = np.concatenate([blocks, self._stream(tail, request.length % BLOCK_TOKENS)])
        return Request(index, request.at_s, request.conversation, tokens, _NO_OUTPUT)

    def accesses(self, segment_tokens: int = 512) -> Accesses:
        """Returns the trace's requests, each with the ids of its full segments of `segment_tokens` tokens that end
        within a full block. A segment that ends within a block counts as shared only with prompts that share that whole
        block. Raises ConfigurationError for a segment of less than one token."""
        if segment_tokens < 1:
            raise ConfigurationError("segment_tokens", segment_tokens, "at least 1")
        known: dict[tuple[int, bytes], int] = {}
        """Segment ids by (id of the previous segment, block ids of the segment). For the first segment of a prompt the
        previous id is -1 minus the number of the session."""

        def chain(session: int, ids: NDArray[np.int64]) -> tuple[int, ...]:
            found, before = [], -1 - session
            for end in range(segment_tokens, len(ids) * BLOCK_TOKENS + 1, segment_tokens):
                first, last = -(-(end - segment_tokens) // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)
                before = known.setdefault((before, ids[first:last].tobytes()), len(known))
                found.append(before)
            return tuple(found)

        prompts = [
            Prompt(
                request.length,
                chain(request.session, request.block_ids),
                request.at_s,
                request.output_length,
                request.conversation,
                request.follows,
                request.pause_s,
            )
            for request in self.requests
        ]
        return Accesses(segment_tokens, prompts)

    def _stream(self, keys: NDArray[np.uint64], count: int) -> NDArray[np.uint32]:
        return stream_tokens(keys, count, VOCABULARY).reshape(-1)


def read_sessions(
    path: Path | str,
    *,
    limit: int | None = None,
    seed: int = 0,
    sessions_per_hour: float = SESSIONS_PER_HOUR,
) -> SessionTrace:
    """The sessions at `path`, in the file's order, started by a Poisson process that `seed` draws; or the first `limit`
    requests of them.

    Token ids are a function of (`seed`, session, block id, position), below `VOCABULARY`; those behind the last full
    block are unique to the request.

    Raises TraceError for a file that cannot be read, has no session, or has a malformed line; ConfigurationError for an
    argument out of range.
    """
    if limit is not None and limit < 1:
        raise ConfigurationError("limit", limit, "at least 1")
    if not 0 < sessions_per_hour < float("inf"):
        raise ConfigurationError("sessions_per_hour", sessions_per_hour, "a finite number above 0")
    path = Path(path)
    sessions = _parse(path)
    rng = random.Random(seed)
    at_s = 0.0
    agents = 0
    requests: list[SessionRequest] = []
    for number, session in enumerate(sessions):
        at_s += rng.expovariate(sessions_per_hour / 3600)
        before = len(requests)
        requests += (
            msgspec.structs.replace(
                request,
                at_s=at_s + request.at_s,
                session=number,
                conversation=agents + request.conversation,
                follows=None if request.follows is None else before + request.follows,
            )
            for request in session
        )
        agents += 1 + max(request.conversation for request in session)
    return SessionTrace(path.name, _in_time_order(requests)[:limit], seed)


def _in_time_order(requests: list[SessionRequest]) -> list[SessionRequest]:
    """The requests sorted by their recorded times and numbered in that order. A request still comes behind the one that
    it follows, because that one is recorded earlier, or at the same time and before it in `requests`."""
    order = sorted(range(len(requests)), key=lambda number: requests[number].at_s)
    places = {number: place for place, number in enumerate(order)}
    return [
        each if each.follows is None else msgspec.structs.replace(each, follows=places[each.follows])
        for each in (requests[number] for number in order)
    ]


def _parse(path: Path) -> list[list[SessionRequest]]:
    """The requests of each session that is no copy of another one, with times from the session's start."""
    sessions: list[list[SessionRequest]] = []
    for number, line in decoded(msgspec.json.Decoder(_Line), path):
        found: list[SessionRequest] = []
        try:
            if line.block_size != BLOCK_TOKENS:
                raise ValueError(f"block_size: expected {BLOCK_TOKENS}, got {line.block_size}")
            if line.primary:
                _add_requests(found, line.requests, 0.0, itertools.count(), None)
        except ValueError as error:
            raise TraceError(path, str(error), number) from None
        if found:
            sessions.append(found)
    if not sessions:
        raise TraceError(path, "expected at least one session that is primary; the file has none")
    return sessions


def _add_requests(
    found: list[SessionRequest],
    entries: Iterable[_Entry],
    start_s: float,
    agents: Iterator[int],
    previous: tuple[int, float] | None,
) -> None:
    """Append the requests of one agent and of its sub-agents to `found`; each agent takes the next number.

    `previous`: (the index in `found` of the request that the agent's first request follows, the end of that
    request's answer in seconds from the agent's start); None where it follows no request.
    """
    agent = next(agents)
    earliest = 0.0
    for entry in entries:
        if entry.t < earliest:
            raise ValueError(f"t: expected at least {earliest:g}, the request before; got {entry.t:g}")
        earliest = entry.t
        if entry.requests is not None:
            begins_s = entry.t - (entry.duration_ms or 0.0) / 1000
            behind = None if previous is None else (previous[0], previous[1] - begins_s)
            _add_requests(found, entry.requests, start_s + entry.t, agents, behind)
        if entry.hash_ids is not None:
            found.append(
                SessionRequest(
                    at_s=start_s + entry.t,
                    session=0,
                    conversation=agent,
                    length=entry.prompt,
                    output_length=entry.output,
                    block_ids=_expand(entry.hash_ids, entry.prompt // BLOCK_TOKENS),
                    follows=None if previous is None else previous[0],
                    pause_s=0.0 if previous is None else max(0.0, entry.t - previous[1]),
                )
            )
            previous = len(found) - 1, entry.t + (entry.api_time or 0.0)


def _expand(text: str, blocks: int) -> NDArray[np.int64]:
    """The block ids that a text such as "1-3,7" lists; raises ValueError unless there are `blocks` of them."""
    ranges: list[tuple[int, int]] = []
    count = 0
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        last = last or first
        if len(part) > _MAX_RANGE_TEXT or not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"hash_ids: expected ids and ranges as in '1-3,7'; got '{part[:_MAX_RANGE_TEXT]}'")
        count += int(last) - int(first) + 1
        if count > blocks:
            break
        ranges.append((int(first), int(last)))
    if count != blocks:
        raise ValueError(f"hash_ids: expected {blocks}, one per full {BLOCK_TOKENS}-token block; got {count}")
    return np.concatenate([np.arange(first, last + 1, dtype=np.int64) for first, last in ranges] or [_NO_IDS])
