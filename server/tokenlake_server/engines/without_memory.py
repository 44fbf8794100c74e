"""Engines that are connected and whose segments have no memory: they store nothing, and find what others stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from tokenlake.config import format_size
from tokenlake.identity import TenantId
from tokenlake.memory import SegmentStore
from tokenlake.wire import Code
from tokenlake_server.engines.connection import EngineConnection
from tokenlake_server.engines.refused import Reason, RefusedEngine, RefusedEngines

CODES = (Code.NO_REGION, Code.QUOTA)
"""The codes of stores for which there may be no memory at all."""
REPORT_S = 5.0
"""Seconds after which an engine is reported whose stores get no slot, and whose segments have no memory: memory
follows use within seconds."""


class WithoutMemory:
    """Looks at the answers to the stores of engines, and reports those whose segments have no memory for `REPORT_S`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: SegmentStore, refused: RefusedEngines) -> None:
        """`refused` counts and logs the reports."""
        self._loop = loop
        self._store = store
        self._refused = refused

    def answered(self, connection: EngineConnection, codes: bytes) -> None:
        """A store of this process is answered with `codes`."""
        if not any(code in codes for code in CODES):
            connection.refused_memory_at, connection.without_memory = 0.0, False
        elif not connection.refused_memory_at:
            connection.refused_memory_at = now = self._loop.time()
            self._loop.call_later(REPORT_S, self._look, connection, now)

    def _look(self, connection: EngineConnection, since: float) -> None:
        if not connection.joined or connection.refused_memory_at != since:
            return
        if self._has_memory(connection):
            self._loop.call_later(REPORT_S, self._look, connection, since)
            return
        connection.without_memory = True
        self._refused.count(connection.process, Reason.MEMORY, _problem(connection))

    def all(self, connections: Iterable[EngineConnection]) -> Iterator[RefusedEngine]:
        """Yields those of the processes whose segments have no memory now."""
        for each in connections:
            if each.joined and each.without_memory and not self._has_memory(each):
                pid, uid, since = each.process.pid, each.process.uid, each.refused_memory_at
                yield RefusedEngine(pid, uid, each.tenant, Reason.MEMORY, _problem(each), since, self._loop.time())

    def _has_memory(self, connection: EngineConnection) -> bool:
        """True if the tenant has slots for the segments of the process, or may take memory for them."""
        assert connection.layout is not None
        at = TenantId(connection.tenant), connection.layout.segment_bytes
        return any(pool.slots for pool in self._store.pools() if pool.id == at) or self._store.has_room(*at)


def _problem(connection: EngineConnection) -> str:
    assert connection.layout is not None
    size = format_size(connection.layout.segment_bytes)
    return f"its segments of {size} get no memory, so that none of them is stored"
