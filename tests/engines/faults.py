"""Seeded faults of the client that an engine's door uses: one source for all doors. It replaces methods of the client's
classes, so that it works with a pool in memory and at a real daemon, in the process of a test and in that of an engine.

::

    door  --calls-->  client  --messages-->  daemon
            |                   |
            |                   requests that are refused by each error and with each code, answers that are late,
            |                   cut, or have wrong checksums, leases that have ended, connections that end before
            |                   and behind a request
            calls that raise any error, copies that raise, bytes that are spoiled before a read that verifies them

A call of the client that is made within another one, or by its own threads, does not raise: its errors are those of the
messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from tests.robustness.live import wait_until
from tokenlake.errors import (
    CredentialRefused,
    DeadlinePassed,
    LayoutRefused,
    LimitReached,
    ListenerUntrusted,
    ProtocolRefused,
    Unreachable,
)
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake_client import testing
from tokenlake_client.channel import Channel
from tokenlake_client.engine_calls import EngineCalls
from tokenlake_client.lease import Lease, PendingNodes
from tokenlake_client.match import PendingMatch
from tokenlake_client.parallel_copy import ParallelCopy
from tokenlake_client.pool import Pool
from tokenlake_client.write import Reservation, Write
from tokenlake_testing.cluster import Node

Patch = Callable[[Any, str, Any], None]
"""`setattr`, or the method of that name of a test's `MonkeyPatch`."""

ERRORS: tuple[type[Exception], ...] = (
    Unreachable,
    DeadlinePassed,
    ListenerUntrusted,
    ProtocolRefused,
    LimitReached,
    LayoutRefused,
    CredentialRefused,
    OSError,
    TimeoutError,
    RuntimeError,
    MemoryError,
    ValueError,
    KeyError,
)
"""What a call raises."""
REFUSALS = (ProtocolRefused, LimitReached, LayoutRefused, CredentialRefused)
"""What a daemon answers with."""
BEFORE, BEHIND = "before", "behind"
CALLS: dict[type, dict[str, tuple[str, ...]]] = {
    Pool: {
        "prefix": (BEFORE,),
        "opaque_keys": (BEFORE,),
        "match": (BEFORE,),
        "store_all": (BEFORE, BEHIND),
        "hint": (BEFORE, BEHIND),
    },
    EngineCalls: {
        "begin_match": (BEFORE,),
        "mark_in_flight": (BEFORE, BEHIND),
        "attach": (BEFORE,),
        "reserve": (BEFORE,),
        "attach_write": (BEFORE,),
        "prefetch": (BEFORE, BEHIND),
        "contents": (BEFORE,),
    },
    PendingMatch: {"poll": (BEFORE,), "wait": (BEFORE,), "cancel": (BEHIND,)},
    Lease: {
        "fetch": (BEFORE,),
        "sources": (BEFORE,),
        "begin_nodes": (BEFORE,),
        "takes": (BEFORE, BEHIND),
        "hint": (BEFORE, BEHIND),
        "release": (BEHIND,),
    },
    PendingNodes: {"poll": (BEFORE,), "cancel": (BEHIND,)},
    Write: {"commit": (BEHIND,), "abort": (BEHIND,), "leave": (BEHIND,)},
    Reservation: {"release": (BEHIND,)},
}
"""The calls that raise, and when: before they have an effect, or behind it. Those that give something back have it in
any case."""
ASKED = (engine.Match, engine.Attach, engine.Fetch, engine.Prepare, engine.Commit, engine.Locate)
"""The requests that are refused, and whose answers are changed."""
TOLD = (*ASKED, engine.Release, engine.Abort, engine.MarkInFlight, engine.Hint)
"""The messages at which a connection ends."""
UNKNOWN_CODE = 250
CODES = (*map(int, Code), UNKNOWN_CODE)
MESSAGES = ("refused", "code", "ended", "cut", "long", "checksum", "late", "lost", "broken")
"""The faults of messages, from which each is chosen with the same chance; those that take long are rarer: `SLOW`."""
SLOW = {"late": 0.2, "lost": 0.2, "broken": 0.2}


VARIABLE = "TOKENLAKE_TEST_FAULTS"
"""The environment variable with the seed of an engine's faults, and the directory in which it records them."""
QUIET = "quiet"
LEFT_S = 60.0


class Faults:
    """The faults, and how many of each kind there were."""

    def __init__(
        self, seed: int, *, calls: float = 0.04, messages: float = 0.15, late_s: float = 0.2, far: float = 0.3
    ) -> None:
        """`calls`, `messages`: the share of calls and of messages that fail. `late_s`: the seconds until a late answer
        arrives, more than the doors' deadlines. `far`: the share of matches whose segments appear to be at another
        node, so that they are fetched."""
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.active = True
        self._chance = random.Random(seed)
        self._calls, self._messages, self._late_s, self._far = calls, messages, late_s, far
        self._lock = threading.Lock()
        self._within = threading.local()
        self._timers: list[threading.Timer] = []
        self._changes: dict[tuple[int, int], str] = {}
        """By channel and id of a request that was sent, the fault of its answer."""
        self._log: int | None = None
        self._quiet: Path | None = None

    @property
    def total(self) -> int:
        """The number of faults so far."""
        return sum(self.counts.values())

    def of(self, kind: str) -> int:
        """The number of faults whose names begin with `kind`."""
        return sum(count for name, count in self.counts.items() if name.startswith(kind))

    def install(self, patch: Patch) -> None:
        """Replace the methods."""
        for owner, calls in CALLS.items():
            for name, moments in calls.items():
                patch(owner, name, self._call(f"{owner.__name__}.{name}", getattr(owner, name), moments))
        patch(Lease, "fetch", self._spoiling(Lease.fetch))
        patch(ParallelCopy, "each", self._copy("each", ParallelCopy.each, outermost=True))
        for owner in (Channel, testing._Channel):
            patch(owner, "_request", self._request(owner._request))
        patch(Channel, "_deliver", self._deliver(Channel._deliver))

    def install_copies(self, patch: Patch, owner: Any, *names: str) -> None:
        """Let functions of a door that copy raise, before they have copied or behind it."""
        for name in names:
            patch(owner, name, self._copy(name, getattr(owner, name)))

    def record(self, directory: Path) -> None:
        """Write each fault into a file of this process in `directory`, and have none after `quiet`: for faults in the
        process of an engine."""
        self._log = os.open(directory / f"{os.getpid()}.faults", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._quiet = directory / QUIET

    def end(self) -> None:
        """No faults any more; late answers have arrived."""
        self.active = False
        for timer in self._timers:
            timer.join()
        self._timers.clear()

    # -- inside

    def _hits(self, share: float) -> bool:
        if not self.active or self._chance.random() >= share:
            return False
        return self._quiet is None or not self._quiet.exists()

    def _count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1
        if self._log is not None:
            os.write(self._log, f"{kind}\n".encode())

    def _error(self, kind: str) -> Exception:
        error = self._chance.choice(ERRORS)
        self._count(f"call {kind} {error.__name__}")
        return error(f"an injected fault of {kind}")

    def _call(self, kind: str, original: Callable[..., Any], moments: Sequence[str]) -> Callable[..., Any]:
        within = self._within

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = threading.current_thread().name == "tokenlake"
            if getattr(within, "depth", False) or ours:
                return original(*args, **kwargs)
            hits = self._hits(self._calls)
            moment = self._chance.choice(moments) if hits else ""
            if moment == BEFORE:
                raise self._error(kind)
            within.depth = True
            try:
                result = original(*args, **kwargs)
            finally:
                within.depth = False
            if moment == BEHIND:
                raise self._error(kind)
            return result

        return call

    def _copy(self, kind: str, original: Callable[..., Any], *, outermost: bool = False) -> Callable[..., Any]:
        @functools.wraps(original)
        def copy(*args: Any, **kwargs: Any) -> Any:
            hits = self._hits(self._calls) and not (outermost and getattr(self._within, "depth", False))
            early = hits and self._chance.random() < 0.5
            result = None if early else original(*args, **kwargs)
            if hits:
                error = self._chance.choice((MemoryError, RuntimeError, OSError))
                self._count(f"copy {kind} {error.__name__}")
                raise error(f"an injected fault of the copy {kind}")
            return result

        return copy

    def _spoiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Change the bytes of the first segment of a fetch that verifies what it reads."""

        @functools.wraps(original)
        def fetch(lease: Lease, start: int = 0, *args: Any, **kwargs: Any) -> Any:
            if (
                start < lease.hits
                and lease.code(start) is Code.LOCAL
                and lease._state.verify
                and self._hits(self._calls)
            ):
                with contextlib.suppress(Exception):
                    region, slot, _ = lease.places[start].tolist()
                    lease._grants.current(lease.link).regions.get(region, write=True).slots[slot][::7] ^= 0x41
                    self._count("bytes spoiled")
            return original(lease, start, *args, **kwargs)

        return fetch

    def _request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(channel: Channel, message: Any, pending: Any = None) -> None:
            fault = self._message_fault(message)
            asked = isinstance(message, ASKED)
            kind = f"message {fault} {type(message).__name__}"
            if fault in ("refused", "code", "ended") and asked:
                answer = self._answer(fault, message)
                if answer is not None:
                    kind += f" {answer[1]}"
                    self._count(kind)
                    if isinstance(message, engine.Commit):
                        # A write that is not committed has ended.
                        original(channel, engine.Abort(message.write))
                    with channel._changed:
                        channel._liveness.heard(time.monotonic())
                        channel._deliver(answer[0])
                        channel._changed.notify_all()
                    return
            elif fault == "broken":
                self._count(kind)
                channel._break(Unreachable("an injected end of the connection"))
                if pending is None:
                    raise Unreachable("an injected end of the connection")
                return
            elif fault and asked:
                self._changes[id(channel), message.id] = fault
            original(channel, message, pending)
            if fault == "lost" and asked:
                self._count(kind)
                channel._break(Unreachable("an injected end of the connection"))

        return request

    def _message_fault(self, message: Any) -> str:
        if not isinstance(message, TOLD) or not self._hits(self._messages):
            return ""
        fault = self._chance.choice(MESSAGES)
        return fault if self._chance.random() < SLOW.get(fault, 1.0) else ""

    def _answer(self, fault: str, message: Any) -> tuple[Any, str] | None:
        """An answer that the daemon did not give, and what it says."""
        if fault == "refused":
            error = self._chance.choice(REFUSALS)
            return engine.Failed(message.id, error.__name__, "an injected refusal"), error.__name__
        if fault == "ended":
            match message:
                case engine.Attach():
                    return engine.Matched(message.id, 0, 0, b"", b"", b""), "lease"
                case engine.Fetch():
                    return engine.Fetched(message.id, b"", b"", b""), "lease"
                case engine.Locate():
                    return engine.Located(message.id, (), b""), "lease"
                case engine.Commit():
                    return engine.Committed(message.id, bytes([Code.EXPIRED]) * len(message.indices)), "write"
            return None
        code = self._chance.choice(CODES)
        said = f"code {code}"
        match message:
            case engine.Match() if code not in (Code.LOCAL, Code.REMOTE):
                count = len(message.keys) // KEY_BYTES
                return engine.Matched(message.id, 0, 0, bytes([code]) * count, b"", b""), said
            case engine.Prepare() if code != Code.RESERVED:
                count = len(message.keys) // KEY_BYTES
                return engine.Prepared(message.id, 0, bytes([code]) * count, bytes(SLOT_BYTES * count)), said
            case engine.Fetch() if code != Code.LOCAL and not message.checksums:
                count = message.stop - message.start
                return engine.Fetched(message.id, bytes([code]) * count, bytes(SLOT_BYTES * count), b""), said
            case engine.Commit() if code != Code.COMMITTED:
                return engine.Committed(message.id, bytes([code]) * len(message.indices)), said
        return None

    def _deliver(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def deliver(channel: Channel, reply: Any) -> None:
            fault = self._changes.pop((id(channel), getattr(reply, "id", 0)), "")
            kind = f"message {fault} {type(reply).__name__}"
            if fault == "lost":
                # The connection ends, and the answer with it.
                return
            if fault == "late":
                self._count(kind)

                def arrive() -> None:
                    with channel._changed:
                        channel._liveness.heard(time.monotonic())
                        original(channel, reply)
                        channel._changed.notify_all()

                timer = threading.Timer(self._late_s, arrive)
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
                return
            changed = _changed(fault, reply)
            if changed is not reply:
                self._count(kind)
            elif isinstance(reply, engine.Matched) and self.active and self._chance.random() < self._far:
                codes = reply.codes.replace(bytes([Code.LOCAL]), bytes([Code.REMOTE]))
                sizes = {name: bytes(len(getattr(reply, name))) for name in ("slots", "checksums")}
                changed = structs.replace(reply, codes=codes, **sizes)
            original(channel, changed)

        return deliver


def _changed(fault: str, reply: Any) -> Any:
    """An answer of another length, or with wrong checksums; the answer itself where it has nothing to change."""
    fields: dict[str, bytes] = {name: getattr(reply, name, b"") for name in ("codes", "owners")}
    name, values = next(((name, values) for name, values in fields.items() if values), ("", b""))
    if fault == "cut" and values:
        changed = {name: values[: len(values) // 2]}
        if isinstance(reply, engine.Fetched):
            # As for a lease of which a part has ended: the lengths agree.
            count = len(values) // 2
            size = len(reply.checksums) // len(values)
            changed |= {"slots": reply.slots[: count * SLOT_BYTES], "checksums": reply.checksums[: count * size]}
        return structs.replace(reply, **changed)
    if fault == "long" and values:
        return structs.replace(reply, **{name: values + values})
    if fault == "checksum" and getattr(reply, "checksums", None):
        return structs.replace(reply, checksums=bytes(each ^ 0xFF for each in reply.checksums))
    return reply


def environment(directory: Path, seed: int) -> dict[str, str]:
    """The environment of an engine whose process calls `begin`."""
    return {VARIABLE: f"{seed} {directory}"}


def begin(*copies: tuple[Any, Sequence[str]], **shares: float) -> None:
    """Begin the faults in the process of an engine, where its environment says so. `copies`: (owner, names) of a door's
    functions that copy."""
    seed, _, directory = os.environ.get(VARIABLE, "").partition(" ")
    if directory:
        faults = Faults(int(seed), **shares)
        faults.record(Path(directory))
        faults.install(setattr)
        for owner, names in copies:
            faults.install_copies(setattr, owner, *names)


def recorded(directory: Path) -> Counter[str]:
    """The faults that engines have recorded in a directory."""
    lines = (each.read_text().splitlines() for each in directory.glob("*.faults"))
    return Counter(itertools.chain.from_iterable(lines))


def quiet(directory: Path) -> None:
    """End the faults of the engines that record into a directory."""
    (directory / QUIET).touch()


def nothing_left(node: Node) -> None:
    """Wait until a daemon has neither leases nor writes of its engines."""
    for kind in ("leases", "writes"):

        def ended(name: str = f'tokenlake_map_entries{{map="{kind}"}}') -> bool:
            return node.metrics()[name] == 0

        wait_until(ended, f"no {kind} are left", LEFT_S)
