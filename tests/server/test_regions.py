"""Memory of regions, given back while a thread of a tier hangs in a call with a view of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tokenlake.core.events import Event, RegionReady
from tokenlake.core.instructions import CloseRegion, MakeRegion
from tokenlake.memory.region import PAGE
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.regions import Regions

DEADLINE_S = 10.0


class Orders:
    """Takes the place of the rules: gives instructions, and collects events."""

    def __init__(self) -> None:
        self.sinks: dict[type, Callable[[Any], None]] = {}
        self.ready: asyncio.Queue[int] = asyncio.Queue()
        self.core = SimpleNamespace(store=SimpleNamespace(regions=SimpleNamespace(making=True, total=0, unmade=0)))

    def carry_out(self, kind: type, sink: Callable[[Any], None]) -> None:
        self.sinks[kind] = sink

    def handle(self, event: Event) -> None:
        assert isinstance(event, RegionReady)
        self.ready.put_nowait(event.region)

    def give(self, order: object) -> None:
        self.sinks[type(order)](order)


def test_a_thread_that_hangs_does_not_keep_memory_from_others() -> None:
    """A read of the cold tier was given up, so that its slot is free, and its thread has not returned."""

    async def run() -> None:
        arena, orders = Arena(), Orders()
        regions = Regions(
            arena,
            orders,  # type: ignore[arg-type]
            SimpleNamespace(nixl=None),  # type: ignore[arg-type]
            asyncio.get_running_loop(),
            lambda done, total: None,
        )
        regions.prepared.set()
        arena.make(0, 4 * PAGE)
        arena.make(1, 4 * PAGE)
        fd = os.dup(arena.region(0).fd)
        (hanging,) = arena.slots([SlotRef(0, 0, 1)], PAGE)
        orders.give(CloseRegion(0))
        orders.give(CloseRegion(1))
        orders.give(MakeRegion(2, 4 * PAGE))
        assert await asyncio.wait_for(orders.ready.get(), DEADLINE_S) == 2
        assert os.fstat(fd).st_blocks == 0, "the memory was given back"
        assert arena.numbers == [0, 2]
        hanging.release()
        async with asyncio.timeout(DEADLINE_S):
            while arena.numbers != [2]:
                await asyncio.sleep(0.01)
        os.close(fd)
        regions.stop()
        await regions.close()
        arena.close()

    asyncio.run(run())
