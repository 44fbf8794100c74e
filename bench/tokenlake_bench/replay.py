"""Replays a workload against daemons: one request at a time, in the order in which they are due."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.baselines import Accesses, Prompt
from tokenlake_bench.live_client import LiveClient, Served
from tokenlake_bench.load_meter import LoadMeter
from tokenlake_bench.routes import Route
from tokenlake_bench.turns import DueTurns
from tokenlake_bench.workload import Workload


@dataclass(slots=True)
class ReplayLog:
    """Sums over the requests of a replay that have been served so far."""

    requests: int = 0
    seconds: float = 0.0
    """Seconds of trace time from the first request to the last."""
    prompt_tokens: int = 0
    hit_segments: int = 0
    remote_segments: int = 0
    wrong_segments: int = 0
    wrong_bytes: int = 0
    match_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)
    cut_by: Counter[Code] = field(default_factory=Counter)
    """Number of requests by the code of their first segment that was not found."""
    failures: int = 0
    """Number of calls that a daemon did not answer in time."""
    stored: Counter[Code] = field(default_factory=Counter)
    """Number of segments that engines wanted to store, by the code of the result."""
    prompts: list[Prompt] = field(default_factory=list)
    """The segment chains of the served requests, in order of service."""
    keys: dict[int, SegmentKey] = field(default_factory=dict)
    """Segment keys of all requested segments, by the segment's id in `Accesses`."""
    interrupted: bool = False

    def add(self, prompt: Prompt, served: Served) -> None:
        """Add the result of a finished request."""
        self.requests += 1
        self.prompts.append(prompt)
        self.prompt_tokens += prompt.tokens
        self.hit_segments += served.hits
        self.remote_segments += len(served.remote)
        self.wrong_segments += served.wrong_segments
        self.wrong_bytes += served.wrong_bytes
        self.match_s.append(served.match_s)
        self.fetch_s += served.fetch_s
        if served.cut_by is not None:
            self.cut_by[served.cut_by] += 1
        self.failures += served.failures
        self.stored += served.stored
        self.keys.update(zip(prompt.chain, served.keys, strict=True))


def replay(
    workload: Workload,
    accesses: Accesses,
    clients: Sequence[LiveClient],
    route: Route,
    *,
    meter: LoadMeter,
    speed: float = 0.0,
    progress: Callable[[ReplayLog], None] = lambda log: None,
) -> ReplayLog:
    """Serve all requests and return the sums. `accesses` are those of `workload`; `DueTurns` tells when each request
    is due. `speed`: trace seconds per second; 0 replays without waiting for the requests' times, and answers take no
    trace time.

    KeyboardInterrupt ends it early: the log is then `interrupted` and covers the finished requests. Raises
    `Unreachable`.
    """
    log = ReplayLog()
    began = time.monotonic()
    first_s: float | None = None
    try:
        turns = DueTurns(accesses.prompts)
        for at_s, number, prompt in turns:
            request = workload[number]
            if speed > 0:
                time.sleep(max(0.0, at_s / speed - (time.monotonic() - began)))
            meter.at(at_s)
            node = route(request)
            served = clients[node].serve(request.tokens)
            turns.answered(number, max(at_s, (time.monotonic() - began) * speed))
            log.add(prompt, served)
            first_s = at_s if first_s is None else first_s
            log.seconds = at_s - first_s
            progress(log)
        meter.close_window()
    except KeyboardInterrupt:
        log.interrupted = True
    return log
