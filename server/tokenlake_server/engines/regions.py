"""The memory of regions: allocated, cut into slots and given back in threads, as the rules order it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor

from tokenlake.core.events import RegionReady
from tokenlake.core.instructions import CloseRegion, CutRegion, MakeRegion
from tokenlake_server.bulk.choice import Transports
from tokenlake_server.engines.arena import Arena
from tokenlake_server.kept.memory import Kept
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.started_threads import started_threads

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two attempts to allocate the memory of a region, or to give it back."""
FIRST_LOOK_S = 0.05
"""Seconds behind the start at which all memory counts as prepared if the rules have ordered none beside that which was
kept."""
MOST_MAKERS = 8
"""Maximum number of threads that allocate memory. The kernel zeroes pages at the bandwidth of the memory with fewer."""
PROGRESS_S = 10.0
"""Seconds between two lines of the log about the memory that is being prepared."""


def makers() -> int:
    """Returns the number of threads that allocate memory."""
    return min(MOST_MAKERS, len(os.sched_getaffinity(0)))


class Regions:
    """Carries out the rules' instructions on regions. Used on the control loop."""

    def __init__(
        self,
        arena: Arena,
        driver: Driver,
        transports: Transports,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[int, int], None],
        kept: Kept | None = None,
    ) -> None:
        """`transports`: those whose memory other nodes may read by themselves. `report`: called with the bytes that are
        prepared, and all bytes. `kept`: what keeps the memory for the next daemon."""
        self._arena = arena
        self._driver = driver
        self._transports = transports
        self._loop = loop
        self._report = report
        self._kept = kept
        self._closing = asyncio.Event()
        self._making: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()
        self._unmapping: set[asyncio.Task[None]] = set()
        """Regions whose memory is given back, and that a thread which hangs may keep mapped for ever."""
        self._threads = started_threads(makers(), "memory")
        self.on_closed: Callable[[int], None] = lambda region: None
        """Called with a region that is about to be given back: engines must not keep it."""
        self.prepared = asyncio.Event()
        """Set once all memory has been allocated for the first time."""
        self._progress_at = time.monotonic() + PROGRESS_S
        driver.carry_out(MakeRegion, lambda order: self._run(self._make(order), self._making))
        driver.carry_out(CutRegion, self._cut)
        driver.carry_out(CloseRegion, self._close)

    def _run(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _make(self, instruction: MakeRegion) -> None:
        """Make a region, again and again until memory is available, then tell the rules by `RegionReady`."""
        # Its memory may be that of a region which is being given back.
        await asyncio.gather(*self._freeing, return_exceptions=True)
        if not await self._until_done(
            f"memory for region {instruction.region} is missing",
            self._threads,
            lambda: self._arena.make(instruction.region, instruction.nbytes),
        ):
            return
        if self._kept is not None:
            self._kept.region_made(instruction.region, instruction.nbytes)
        self._driver.handle(RegionReady(instruction.region))
        self.show_progress()

    def adopted(self) -> None:
        """Regions of an earlier daemon are in the arena, and the rules know them."""
        if self._transports.nixl is not None:
            for region in self._arena.numbers:
                if self._driver.core.store.region_owner(region) is not None:
                    self._transports.nixl.add(region)
        # The rules order what is missing with their first timer.
        self._loop.call_later(FIRST_LOOK_S, self.show_progress)

    def show_progress(self) -> None:
        """Report how much memory is prepared. To be called when some was."""
        if self.prepared.is_set():
            return
        regions = self._driver.core.store.regions
        if not regions.making:
            # What is unmade now takes no slot of the engines that have connected meanwhile.
            self.prepared.set()
        left, total = self.unprepared, regions.total
        self._report(total - left, total)
        if time.monotonic() > self._progress_at:
            self._progress_at = time.monotonic() + PROGRESS_S
            log.info("%.1f of %.1f GiB of memory are prepared", (total - left) / (1 << 30), total / (1 << 30))

    @property
    def unprepared(self) -> int:
        """The bytes of memory that have not been allocated yet since the start."""
        regions = self._driver.core.store.regions
        return 0 if self.prepared.is_set() else regions.unmade + sum(regions.making.values())

    def _cut(self, instruction: CutRegion) -> None:
        self._arena.region(instruction.region).cut(instruction.nbytes, instruction.slot_bytes)
        if self._kept is not None:
            pool = self._driver.core.store.region_owner(instruction.region)
            if pool is not None:
                self._kept.region_cut(instruction.region, instruction.nbytes, instruction.slot_bytes, pool.tenant)
        self._run(self._trim(instruction.region), self._freeing)

    async def _trim(self, region: int) -> None:
        await asyncio.to_thread(self._arena.region(region).trim)
        if self._transports.nixl is not None:
            self._transports.nixl.add(region)

    def _close(self, instruction: CloseRegion) -> None:
        self.on_closed(instruction.region)
        if self._kept is not None:
            self._kept.region_closing(instruction.region)
        self._run(self._close_until_done(instruction.region, list(self._freeing)), self._freeing)

    async def _close_until_done(self, region: int, before: Sequence[asyncio.Task[None]]) -> None:
        # The region may still be trimmed.
        await asyncio.gather(*before, return_exceptions=True)
        if self._transports.nixl is not None:
            await asyncio.to_thread(self._transports.nixl.remove, region)
        await self._until_done(f"region {region} cannot be given back", None, lambda: self._arena.free(region))
        self._run(self._unmap(region), self._unmapping)

    async def _unmap(self, region: int) -> None:
        await self._until_done(f"region {region} cannot be unmapped", None, lambda: self._arena.end(region))

    async def _until_done(self, problem: str, threads: Executor | None, work: Callable[[], None]) -> bool:
        """Do `work` in a thread, again and again until it raises nothing; log the first failure. Returns False if the
        daemon ends before."""
        logged = False
        while not self._closing.is_set():
            try:
                await self._loop.run_in_executor(threads, work)
                return not self._closing.is_set()
            except Exception as error:
                if not logged:
                    log.error("%s, and is tried each %.1f s: %s", problem, RETRY_S, error)
                logged = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), RETRY_S)
        return False

    def stop(self) -> None:
        """Try nothing again: the daemon ends."""
        self._closing.set()

    async def close(self) -> None:
        """Wait for the threads; called after `stop` and after `Arena.stop`."""
        await asyncio.gather(*self._making, *self._freeing, return_exceptions=True)
        await asyncio.gather(*self._unmapping, return_exceptions=True)
        self._threads.shutdown()
