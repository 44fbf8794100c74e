"""An engine that cannot use the pool tells the daemon why: operators see it beside the engines that were refused."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from tokenlake_client.engines.common.connection import Connection


def declined(socket: str | Path | None, daemon_uid: int | None, reason: str) -> Connection:
    """A connection that is never made. At the start, and later when `get` is called, at most every 30 s, it tells the
    daemon why the engine goes without the pool: the daemon may start later, or again. `socket`, `daemon_uid`: as of
    `Pool.connect`. Never raises."""

    def tell() -> NoReturn:
        # The import is here, because an engine that was given a pool does not need the client's connection code.
        from tokenlake_client.link import decline

        decline(Path(socket) if socket else None, daemon_uid, reason)

    return Connection(tell, lambda operation, error: None, wait_s=0.0)
