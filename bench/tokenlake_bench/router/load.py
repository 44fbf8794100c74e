"""The clients: a few sessions at a time, each of which sends its next request after the answer."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tokenlake_bench.router.child import HttpChild
from tokenlake_bench.router.engines import MODEL_NAME
from tokenlake_bench.router.sessions import Message, Sessions

ANSWER_S = 300.0


@dataclass
class Served:
    """The times and tokens that the clients measured."""

    ttft_s: list[float] = field(default_factory=list)
    """Seconds from the request to the first text of its answer, of the requests that had one."""
    errors: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


def first_text(line: bytes) -> bool:
    """Whether a line of a streamed chat has text of the answer."""
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool((choices[0].get("delta") or {}).get("content"))


def stream(router: HttpChild, messages: list[Message], tokens: int) -> float:
    """Send a chat and read its answer to the end. Returns the seconds to the first text. Raises OSError and
    ValueError."""
    body = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers: Mapping[str, str] = {"Content-Type": "application/json", **router.headers}
    request = urllib.request.Request(f"{router.base}/v1/chat/completions", json.dumps(body).encode(), dict(headers))
    began = time.perf_counter()
    first: float | None = None
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        for line in answer:
            if first is None and first_text(line):
                first = time.perf_counter() - began
    if first is None:
        raise ValueError("an answer without text")
    return first


def serve(router: HttpChild, sessions: Sessions, at_once: int, served: Callable[[], None]) -> Served:
    """Send all requests of the sessions, `at_once` sessions at a time. `served` is called after each request."""
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(sessions.sessions):
        waiting.put(number)
    found, lock = Served(), threading.Lock()

    def client() -> None:
        while True:
            try:
                session = waiting.get_nowait()
            except Empty:
                return
            for turn in range(sessions.turns):
                try:
                    seconds = stream(router, sessions.request(session, turn), sessions.answer_tokens)
                except (OSError, ValueError) as error:
                    with lock:
                        found.errors.append(f"{type(error).__name__}: {error}")
                else:
                    with lock:
                        found.ttft_s.append(seconds)
                served()

    began = time.perf_counter()
    threads = [threading.Thread(target=client, daemon=True) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.elapsed_s = time.perf_counter() - began
    return found
