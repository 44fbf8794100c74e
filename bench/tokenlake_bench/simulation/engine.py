"""A simulated engine: one process at one node, which serves requests concurrently.

Each request does the same as the engine of a live replay (`live_client.LiveClient`), on simulated time: it matches,
fetches and releases a window at a time, then computes and stores the rest a window at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from tokenlake.core import events
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine
from tokenlake_bench.live_client import PATIENCE_S, WINDOW
from tokenlake_bench.simulation.arrivals import Arrival, keys_of
from tokenlake_bench.simulation.disk import CHECKSUM
from tokenlake_bench.simulation.node import SimNode
from tokenlake_bench.simulation.options import SimulationOptions

SOCKET_S = 20e-6
"""Seconds that a message takes from an engine to its daemon, or back."""
RETRY_S = 0.002
LONGEST_RETRY_S = 0.05
"""Seconds between two attempts of a store that the daemon refuses because too many segments are being written:
`RETRY_S`, doubled after each refusal up to `LONGEST_RETRY_S`, as in the client."""
TENANT = "default"
MOST_TOKENS = (1 << 32) - 1
_Step = engine.EngineRequest | float
"""One action of a simulated request: a request to the daemon, or seconds to wait."""
Steps = Generator[_Step, engine.EngineReply | None, None]


@dataclass(slots=True, eq=False)
class RequestOutcome:
    """The outcome of one request: segments found and stored in the pool. Counts are numbers of segments."""

    arrival: Arrival
    node: int
    answered: Callable[[], None]
    """A function to call once, when the request is answered."""
    engine: int = 0
    """Number of segments in the engine's own cache, which are a contiguous prefix of the prompt and are not read."""
    hits: int = 0
    """Number of segments in the engine's own cache or read from the pool, which are a contiguous prefix of the
    prompt."""
    remote: int = 0
    """Number of the `hits` that came from other nodes."""
    cut_by: Code | None = None
    found: int = 0
    """Number of segments that the pool had, which are a contiguous prefix of the prompt."""
    stored: Counter[Code] = field(default_factory=Counter)
    read_s: float = 0.0
    """Seconds from the match to the last byte of the prefix."""


class SimulatedEngine:
    """A simulated engine, which joins its node's daemon when constructed. `finished` is called with the outcome of each
    finished request."""

    def __init__(
        self, node: SimNode, options: SimulationOptions, window: int, finished: Callable[[RequestOutcome], None]
    ) -> None:
        self._node = node
        self._clock = node.clock
        self._options = options
        self._window = window
        self._finished = finished
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Steps] = {}
        self.connection = 1
        self.joined = False
        self.open = 0
        """Number of requests that the engine has begun and not finished."""
        node.engines[self.connection] = self
        layout = options.layout
        node.deliver(events.Joined(self.connection, 0, TENANT, layout.segment_bytes, 1, layout.segment_tokens, 0, 0))
        self._beat()

    def serve(self, arrival: Arrival, answered: Callable[[], None] = lambda: None) -> None:
        """Begin a request. `answered` is called when its answer is complete, which here is when its segments are
        stored."""
        self.open += 1
        self._advance(self._request(RequestOutcome(arrival, self._node.index, answered)), None)

    def hear(self, message: engine.EngineReply) -> None:
        """Take a reply that the daemon sends now; the engine gets it after `SOCKET_S` seconds."""
        self._clock.after(SOCKET_S, self._answered, message)

    # -- steps

    def _answered(self, message: engine.EngineReply) -> None:
        steps = self._waiting.pop(message.id, None)
        if steps is not None:
            self._advance(steps, message)

    def _advance(self, steps: Steps, message: engine.EngineReply | None) -> None:
        step = next(steps, None) if message is None else _resume(steps, message)
        if isinstance(step, float):
            self._clock.after(step, self._advance, steps, None)
        elif step is not None:
            self._waiting[step.id] = steps  # type: ignore[union-attr]
            self._send(step)

    def _send(self, message: engine.EngineRequest) -> None:
        self._clock.after(SOCKET_S, self._node.deliver, events.Requested(self.connection, message))

    def _beat(self) -> None:
        self._send(engine.Heartbeat(next(self._numbers)))
        self._clock.after(self._node.core.config.lease_s / 3, self._beat)

    # -- a request

    def _request(self, served: RequestOutcome) -> Steps:
        keys = keys_of(served.arrival.chain, self._options.seed)
        began = self._clock.now
        if keys:
            yield from self._read(served, keys)
        served.read_s = self._clock.now - began
        if served.hits * KEY_BYTES < len(keys):
            yield from self._store(served, keys, served.hits)
        self.open -= 1
        self._finished(served)
        served.answered()

    def _read(self, served: RequestOutcome, keys: bytes) -> Steps:
        """Match and fetch the prefix, `MAX_KEYS` keys at a time: the next ones once all before them were read."""
        wait_s, count = self._in_flight_wait_s(served, keys), len(keys) // KEY_BYTES
        for first in range(0, count, engine.MAX_KEYS):
            last = min(first + engine.MAX_KEYS, count)
            yield from self._read_part(served, keys[first * KEY_BYTES : last * KEY_BYTES], first, wait_s)
            if served.hits < last:
                break
        served.hits = max(served.hits, served.engine)

    def _read_part(self, served: RequestOutcome, asked: bytes, first: int, wait_s: float) -> Steps:
        """Match and fetch the segments `asked`, which begin at segment `first` of the prompt."""
        hints = served.arrival.hints
        matched = yield engine.Match(next(self._numbers), asked, 0.0, False, hints=hints, in_flight_wait_s=wait_s)
        assert isinstance(matched, engine.Matched)
        if matched.hits < len(matched.codes):
            served.cut_by = Code(matched.codes[matched.hits])
        served.found = first + matched.hits
        own = min(max(0, served.engine - first), len(asked) // KEY_BYTES)
        hits = min(own, matched.hits)
        if hits or not matched.hits:
            took = (matched.lease, own * self._options.segment_tokens, MOST_TOKENS, 0.0)
            self._give_back(matched.lease, 0, hits, took)
        while hits < matched.hits:
            start, stop = hits, min(hits + self._window, matched.hits)
            codes = matched_codes = matched.codes[start:stop]
            if Code.REMOTE in codes:
                fetched = yield engine.Fetch(next(self._numbers), matched.lease, start, stop, 0.0, False)
                assert isinstance(fetched, engine.Fetched)
                codes = fetched.codes
            arrived = len(codes) - len(codes.lstrip(_LOCAL))
            hits += arrived
            served.remote += matched_codes[:arrived].count(Code.REMOTE)
            if load_s := self._load_s(arrived):
                yield load_s
            if arrived:
                # The engine says what it took so far, and the time in which it would have computed it.
                size, saved_s = self._options.segment_tokens, self._saved_s(served, first + own, first + hits)
                took = matched.lease, own * size, hits * size, saved_s
                self._send(engine.Release(((matched.lease, start, hits),), read=True, took=(took,)))
            if hits < stop:
                served.cut_by = Code.LOST
                self._give_back(matched.lease, hits, matched.hits)
                break
        served.hits = first + hits

    def _give_back(self, lease: int, start: int, stop: int, *took: tuple[int, int, int, float]) -> None:
        """Give back items that the engine did not read."""
        for ranges in engine.releasable([(lease, start, stop)]):
            self._send(engine.Release(ranges, took=took))

    def _store(self, served: RequestOutcome, keys: bytes, first: int) -> Steps:
        """Store the segments of a prompt from segment `first` on."""
        count = len(keys) // KEY_BYTES
        pause, until = RETRY_S, self._clock.now + PATIENCE_S
        while first < count:
            last = min(first + WINDOW, count)
            window = keys[first * KEY_BYTES : last * KEY_BYTES]
            prepared = yield engine.Prepare(next(self._numbers), window, first, hints=served.arrival.hints)
            assert isinstance(prepared, engine.Prepared)
            codes = bytearray(prepared.codes)
            done = len(codes)
            if (refused := Code.first_passing(codes)) >= 0:
                done = refused
                if not prepared.write and self._clock.now + pause <= until:
                    yield pause
                    pause = min(2 * pause, LONGEST_RETRY_S)
                    continue
                if not prepared.write:
                    done = len(codes)
            if prepared.write:
                yield from self._write(prepared, codes)
                pause, until = RETRY_S, self._clock.now + PATIENCE_S
            served.stored.update(map(Code, codes[:done]))
            first += done

    def _write(self, prepared: engine.Prepared, codes: bytearray) -> Steps:
        """Compute and commit the segments whose codes are RESERVED, and replace these codes by the results of the
        commit."""
        reserved = tuple(at for at, code in enumerate(codes) if code == Code.RESERVED)
        if compute_s := self._compute_s(len(reserved)):
            yield compute_s
        committed = yield engine.Commit(next(self._numbers), prepared.write, reserved, 1, CHECKSUM * len(reserved))
        assert isinstance(committed, engine.Committed)
        for at, code in zip(reserved, committed.codes, strict=True):
            codes[at] = code

    def _in_flight_wait_s(self, served: RequestOutcome, keys: bytes) -> float:
        """Returns the seconds that the match of a prompt may wait for another engine that computes it: longer than this
        engine would compute. The other engine began earlier, and the notice that it is done arrives a little after its
        computation."""
        return 0.0

    def _load_s(self, segments: int) -> float:
        """Returns the seconds in which segments of this node's memory are copied to the engine's own cache."""
        return 0.0

    def _saved_s(self, served: RequestOutcome, first: int, last: int) -> float:
        """Returns the seconds in which the engine would compute the segments from `first` to `last` of a prompt, whose
        end it computes in any case; 0 where it does not measure that."""
        return 0.0

    def _compute_s(self, segments: int) -> float:
        """Returns the seconds until computed segments are in their slots: this engine computes in no time."""
        return 0.0


_LOCAL = bytes([Code.LOCAL])


def _resume(steps: Steps, message: engine.EngineReply) -> _Step | None:
    try:
        return steps.send(message)
    except StopIteration:
        return None
