"""The cold tier of a daemon: connects the place of the setting `cold` with the rules."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tokenlake.config import ServerConfig
from tokenlake.core.instructions import ColdErase, ColdLook, ColdRead, ColdWrite
from tokenlake.metrics import Level
from tokenlake_server.cold.names import ColdTenant
from tokenlake_server.cold.places import open_place, require_place
from tokenlake_server.cold.state import ColdState, cold_gauges
from tokenlake_server.cold.store import ColdStore, Surroundings
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.engines.tenants import DEFAULT_SECRET, Tenants
from tokenlake_server.loop.driver import Driver

log = logging.getLogger(__name__)

ERASED_S, LOOK_S = 5.0, 0.02
"""Seconds for which an operator waits until evicted objects are deleted, and between two looks for that."""
WATCH_S = 0.5
"""Interval at which the place is watched for calls that take too long."""


class ColdTier:
    """The cold tier of one daemon; without the setting `cold` nothing happens. Used on the control loop; `close` is
    called from a thread."""

    def __init__(
        self,
        config: ServerConfig,
        arena: Arena,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        contents: Contents,
        tenants: Tenants,
        evicted_s: Callable[[], float],
    ) -> None:
        """`evicted_s`: as of `Surroundings`. Raises `ConfigurationError` for a place that cannot be one."""
        self._driver = driver
        self._loop = loop
        self._alarm: asyncio.TimerHandle | None = None
        self._store: ColdStore | None = None
        if config.cold:
            require_place(config.cold)
            secrets = {tenant.name: ColdTenant(tenant.secret) for tenant in tenants}
            around = Surroundings(arena, driver.post, contents, secrets, evicted_s)
            place = config.cold
            self._store = ColdStore(place, lambda: open_place(place), config.cold_size, config.cold_days, around)
            if any(tenant.secret == DEFAULT_SECRET for tenant in tenants):
                log.warning(
                    "objects in 'cold' are not protected from those who can read %s: without 'tenants' the secret that "
                    "encrypts them is public",
                    place,
                )
        for kind in (ColdRead, ColdWrite):
            driver.carry_out(kind, self._carry_out)
        driver.carry_out(ColdLook, self._look)
        driver.carry_out(ColdErase, self._erase)

    @property
    def state(self) -> ColdState | None:
        """The state of the tier; None where there is none."""
        return self._store.state if self._store is not None else None

    @property
    def serving(self) -> bool:
        """True while the tier is used."""
        state = self.state
        return state is not None and state.serving

    def gauges(self) -> list[Level]:
        """The gauges of the tier."""
        state = self.state
        return list(cold_gauges(state)) if state is not None else []

    def start(self) -> None:
        """Begin to open the place; the rules hear when it can be used. Raises `LimitReached`."""
        if self._store is not None:
            self._store.start()
            self._watch()

    def _watch(self) -> None:
        if self._store is not None:
            self._store.watch(time.monotonic())
            self._alarm = self._loop.call_later(WATCH_S, self._watch)

    def abort(self, fetch: int) -> None:
        """End a read, if it is one of this tier."""
        if self._store is not None:
            self._store.abort(fetch)

    def _carry_out(self, order: ColdRead | ColdWrite) -> None:
        self._there.carry_out(order)

    def _look(self, order: ColdLook) -> None:
        self._driver.handle(self._there.look(order))

    def _erase(self, order: ColdErase) -> None:
        if self._store is not None:
            self._store.erase(order)

    async def erased(self) -> list[str]:
        """Wait until all objects that were evicted are deleted. Returns a text if some are not, after `ERASED_S`: a
        daemon that ends before has forgotten to delete them."""
        until = self._loop.time() + ERASED_S
        while self._store is not None and self._store.erasing:
            if self._loop.time() > until:
                return [f"{self._store.name}: its objects are not deleted yet; evict them again if this node restarts"]
            await asyncio.sleep(LOOK_S)
        return []

    @property
    def _there(self) -> ColdStore:
        if self._store is None:
            raise RuntimeError("there is no cold tier")
        return self._store

    def stop(self) -> None:
        """Stop watching the place. Called on the loop before `close`."""
        if self._alarm is not None:
            self._alarm.cancel()

    def close(self) -> None:
        """End what has begun, and write the last journal. Blocks for some seconds at most."""
        if self._store is not None:
            self._store.close()
