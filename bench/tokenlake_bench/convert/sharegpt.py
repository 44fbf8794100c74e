"""Conversations as in ShareGPT's files: a JSON array, or JSON lines, of objects with `conversations`, a list of turns
that have `from` and `value` (or `role` and `content`; the list may be called `messages`).

Each answer is a request whose prompt is all turns before it. The files have no times: conversations begin by a Poisson
process, and a turn follows the one before it after the answer's tokens at `TOKEN_S` each and an exponential pause.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenlake.errors import TokenLakeError
from tokenlake_bench.convert.base import Log, Logged, Wrong
from tokenlake_bench.trace_lines import TraceError

TOKEN_S: Final = 0.02
"""Seconds in which a user gets, and reads, a token of an answer."""
PAUSE_S: Final = 30.0
"""Mean seconds from the end of an answer to the next turn."""
TURNS: Final = 3.5
"""Requests of a conversation in ShareGPT's own file on average: `rate` requests begin `rate / TURNS` conversations."""
CHUNK: Final = 1 << 20
LONGEST: Final = 64 << 20
"""Bytes of the longest conversation that is read."""
_ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}


def read_sharegpt(log: Log) -> Iterator[Logged]:
    """The requests of the conversations, in order of their drawn times."""
    draw = random.Random(log.seed)
    starts = log.arrivals()
    order = itertools.count()
    waiting: list[tuple[float, int, Logged]] = []
    start_s = 0.0
    for number, conversation in _objects(log):
        # A Poisson process of `rate` has every `TURNS`-th of its times, on average, as the beginning of a conversation.
        start_s = next(starts) * TURNS
        while waiting and waiting[0][0] <= start_s:
            yield heapq.heappop(waiting)[2]
        try:
            for logged in _requests(log, number, conversation, start_s, draw):
                heapq.heappush(waiting, (logged.at_s, next(order), logged))
        except Wrong as error:
            log.report.wrong(log.path, number, str(error))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _requests(log: Log, number: int, conversation: object, at_s: float, draw: random.Random) -> Iterator[Logged]:
    messages = _messages(conversation)
    asked = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
    if not asked:
        log.report.left_out["conversations without an answer"] += 1
        return
    try:
        texts = [log.prompts.render({"messages": messages[:place]}) for place in asked]
    except TokenLakeError:
        raise
    except ValueError as error:
        raise Wrong(str(error)) from None
    prompts = log.prompts.encode(texts, special=False)
    answers = log.prompts.encode([messages[place]["content"] for place in asked], special=False)
    for tokens, answer in zip(prompts, answers, strict=True):
        if tokens:
            yield Logged(at_s, len(tokens), log.ids.of_tokens(tokens), len(answer), number)
        at_s += TOKEN_S * len(answer) + draw.expovariate(1 / PAUSE_S)


def _messages(conversation: object) -> list[dict[str, str]]:
    turns = None
    if isinstance(conversation, Mapping):
        turns = conversation.get("conversations", conversation.get("messages"))
    if not isinstance(turns, list):
        raise Wrong("expected 'conversations', a list of turns")
    messages: list[dict[str, str]] = []
    for turn in turns:
        role = turn.get("from", turn.get("role")) if isinstance(turn, Mapping) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
        if not isinstance(role, str) or role.lower() not in _ROLES or not isinstance(text, str):
            raise Wrong(f"conversations: expected turns with 'from' ({', '.join(_ROLES)}) and 'value'")
        messages.append({"role": _ROLES[role.lower()], "content": text})
    return messages


def _objects(log: Log) -> Iterator[tuple[int, Any]]:
    """(number, value) of the elements of a JSON array, or of the lines of a file that begins with no array. One element
    is in memory at a time. Raises TraceError for an array that breaks off or is no JSON."""
    text = b""
    while not text.strip() and (chunk := log.file.read(CHUNK)):
        text = chunk
    if not text.lstrip().startswith(b"["):
        yield from _lines(log, text)
        return
    decode = json.JSONDecoder().raw_decode
    # Undecodable bytes, and the first half of a character at the end of a chunk, stay as they are until they are whole.
    waiting = text.lstrip()[1:].decode("utf-8", "surrogateescape")
    for number in itertools.count(1):
        need = CHUNK
        while True:
            waiting = waiting.lstrip(" \t\r\n,")
            if waiting.startswith("]"):
                return
            try:
                value, end = decode(waiting) if waiting else (None, 0)
            except (ValueError, RecursionError):
                end = 0
            if end:
                break
            # The next try has at least twice as much text, so that all tries together cost as much as two.
            need = max(need, len(waiting))
            chunk = log.file.read(need)
            if not chunk or len(waiting) > LONGEST:
                raise TraceError(
                    log.path, "expected a JSON array of conversations; it breaks off, or is no JSON", number
                )
            waiting = (waiting.encode("utf-8", "surrogateescape") + chunk).decode("utf-8", "surrogateescape")
        yield number, value
        waiting = waiting[end:]


def _lines(log: Log, text: bytes) -> Iterator[tuple[int, Any]]:
    number = 0
    while text:
        *whole, text = text.split(b"\n")
        for line in whole:
            number += 1
            yield from _line(log, number, line)
        if not (chunk := log.file.read(CHUNK)):
            yield from _line(log, number + 1, text)
            return
        text += chunk
        if len(text) > LONGEST:
            raise TraceError(log.path, f"expected a line of at most {LONGEST >> 20} MiB", number + 1)


def _line(log: Log, number: int, line: bytes) -> Iterator[tuple[int, Any]]:
    if line.strip():
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            log.report.wrong(log.path, number, f"expected a JSON object; {error}")
