"""Engines that run on this machine and go without the pool: the reason of each, and its cure, for operators.

An engine that the daemon refuses serves its requests by itself, and says so in its own log alone. The daemon counts
each refusal, logs the first one of a process, and keeps it until the process is accepted or has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from tokenlake.errors import TokenLakeError
from tokenlake.log_lines import one_line
from tokenlake.metrics import Counters, Metric
from tokenlake_server.engines.connected_process import ConnectedProcess

log = logging.getLogger(__name__)

MAX_KEPT = 64
"""Limit of the processes that are kept; of more, those that were refused last."""
FORGOTTEN_S = 600.0
"""Seconds after its last refusal in which a process is kept whose end the daemon cannot notice (it has no pidfd)."""

REFUSED_ENGINES = Metric(
    "tokenlake_refused_engines_total",
    "Refusals of engines, each attempt of a process to connect, by [reason](operations/runbook.md#engines-are-refused)",
    "reason",
)


class Reason(enum.StrEnum):
    """Why an engine goes without the pool."""

    TOKEN = enum.auto()
    UID = enum.auto()
    VERSION = enum.auto()
    PROBE = enum.auto()
    LAYOUT = enum.auto()
    WEIGHTS = enum.auto()
    MEMORY = enum.auto()
    LIMIT = enum.auto()
    SESSION = enum.auto()
    """The session that the process joins has ended. Its engine opens another one by itself, so it is only counted."""
    DECLINED = enum.auto()
    """The engine itself does not use the pool, and has said why (`Bye.reason`)."""

    @property
    def cure(self) -> str:
        """The action of an operator."""
        return _CURES[self]


_SAME = "install the same version of tokenlake for the daemon and the engine"
_CURES = {
    Reason.TOKEN: "give the engine a token of its tenant: `credential` of the engine, `tokens` of the tenant here",
    Reason.UID: "add the uid to 'allow_uids' or to 'uids' of a tenant and restart the daemon, or give the engine the "
    "token of a tenant",
    Reason.VERSION: _SAME,
    Reason.PROBE: _SAME,
    Reason.LAYOUT: "start all processes of an engine with one configuration, and " + _SAME,
    Reason.WEIGHTS: "restart the engine, so that it finds the digest of its new weights",
    Reason.MEMORY: "give the daemon more 'memory', or the tenant a larger quota",
    Reason.LIMIT: "end engines that are not needed, or raise the limit that is named",
    Reason.SESSION: "none: the engine opens another session by itself",
    Reason.DECLINED: "do as the engine's reason says, or start the engine without the pool",
}


class EngineRefused(Exception):
    """An engine is refused for `reason`, with `error`."""

    def __init__(self, reason: Reason, error: TokenLakeError) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error


@contextlib.contextmanager
def refused_for(reason: Reason) -> Iterator[None]:
    """Raise an error of this block as an `EngineRefused` for `reason`."""
    try:
        yield
    except TokenLakeError as error:
        raise EngineRefused(reason, error) from error


class RefusedEngine(msgspec.Struct):
    """A process of an engine that runs and goes without the pool. Times are those of the loop."""

    pid: int
    """0 for a process of another PID namespace."""
    uid: int
    tenant: str
    """Empty where it is not known."""
    reason: Reason
    problem: str
    """One line."""
    first: float
    last: float
    attempts: int = 1


class RefusedEngines:
    """The processes of engines that were refused and have not ended, at most `MAX_KEPT`. Owns a pidfd of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, counters: Counters) -> None:
        self._loop = loop
        self._counters = counters
        self._kept: OrderedDict[tuple[int, int], RefusedEngine] = OrderedDict()
        """By uid and pid, those that were refused last at the end."""
        self._pidfds: dict[tuple[int, int], int] = {}
        for reason in Reason:
            # All series exist from the start, so that the first refusal is an increase.
            counters.add_for(REFUSED_ENGINES, 0, reason)

    def refused(self, process: ConnectedProcess, tenant: str, reason: Reason, problem: str) -> None:
        """A process of an engine was refused."""
        key, now, problem = (process.uid, process.pid), self._loop.time(), one_line(problem)
        known = self._kept.get(key)
        self.count(process, reason, problem, repeated=known is not None and known.reason == reason)
        if reason is Reason.SESSION:
            return
        if known is None:
            known = self._kept[key] = RefusedEngine(process.pid, process.uid, tenant, reason, problem, now, now, 0)
            self._watch(key, process)
        known.tenant, known.reason, known.problem, known.last = tenant, reason, problem, now
        known.attempts += 1
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._forget(next(iter(self._kept)))

    def count(self, process: ConnectedProcess, reason: Reason, problem: str, *, repeated: bool = False) -> None:
        """Count a refusal, and log it unless it is `repeated`."""
        self._counters.add_for(REFUSED_ENGINES, 1, reason)
        level = logging.DEBUG if repeated or reason is Reason.SESSION else logging.WARNING
        extra = {"kind": "refused engine"}
        who = f"process {process.pid} of uid {process.uid}"
        log.log(level, "an engine goes without the pool (%s): %s; cure: %s", who, problem, reason.cure, extra=extra)

    def accepted(self, process: ConnectedProcess) -> None:
        """A process of an engine has joined a session."""
        self._forget((process.uid, process.pid))

    def all(self) -> list[RefusedEngine]:
        """The processes that go without the pool, those that were refused last at the end."""
        late = self._loop.time() - FORGOTTEN_S
        for key in [key for key, each in self._kept.items() if key not in self._pidfds and each.last < late]:
            self._forget(key)
        return list(self._kept.values())

    def close(self) -> None:
        """Close the pidfds."""
        for key in list(self._kept):
            self._forget(key)

    def _watch(self, key: tuple[int, int], process: ConnectedProcess) -> None:
        if process.pidfd is None:
            return
        # Without a descriptor for it the process is kept for a time.
        with contextlib.suppress(OSError):
            pidfd = self._pidfds[key] = os.dup(process.pidfd)
            self._loop.add_reader(pidfd, self._forget, key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._kept.pop(key, None)
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
