"""Opens the pool for a manager: the layout is known when all ranks have reported, and a background thread makes the
connection. Imports no engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.engines.vllm.offloading.identity import EngineIdentity, RankFacts, opaque_layout
from tokenlake_client.engines.vllm.offloading.manager import ChunkManager
from tokenlake_client.pool import Pool


class Opening:
    """Opens the pool for a manager. The methods are for the scheduler's thread, and do not wait."""

    def __init__(
        self,
        manager: ChunkManager,
        connect: Callable[[OpaqueLayout], Pool],
        report: Callable[[str, BaseException], None],
        decline: Callable[[str], Connection],
    ) -> None:
        """`connect` opens a connection. `report` is called with the operation that failed and its error. `decline`
        tells the daemon why the engine goes without the pool (`declined`)."""
        self._manager = manager
        self._connect = connect
        self._report = report
        self._decline = decline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-open")
        self._identity: Future[EngineIdentity] | None = None
        self._facts: dict[int, RankFacts] = {}
        self.layout: OpaqueLayout | None = None
        """The layout, once all ranks have reported."""
        self.connection: Connection | None = None
        self.epoch = WeightsEpoch(None)
        """The epoch of the weights, whose digest is known when all ranks have reported."""
        self._lock = threading.Lock()
        """Guards `connection` and `_closed`, which the background thread and the scheduler's thread use."""
        self._closed = False

    def identify(self, identity: Callable[[], EngineIdentity]) -> None:
        """Call `identity` in the background thread: it returns the parts of the layout that the scheduler's side
        knows."""
        try:
            self._identity = self._thread.submit(identity)
        except RuntimeError:
            # No thread can be started. The executor has queued the call all the same, which changes nothing twice.
            self._identity = Future()
            self._identity.set_result(identity())

    def reported(self, facts: Mapping[int, RankFacts], ranks: int) -> None:
        """Take the reports of some of the `ranks` ranks. The last one opens the pool."""
        complete = len(self._facts) == ranks
        self._facts.update(facts)
        if len(self._facts) == ranks and not complete:
            with contextlib.suppress(RuntimeError):
                # Without a thread the executor opens the pool with its next call.
                self._thread.submit(self._open)

    def requested(self) -> None:
        """Record that a request has arrived: where there is no pool, the next attempt may be due."""
        if self.connection is not None:
            self.connection.get()

    @property
    def pool(self) -> Pool | None:
        """The connection to the daemon, also while it is lost; None before the first one."""
        return self.connection.pool if self.connection is not None else None

    def close(self) -> None:
        """End the connection. One that is being made is ended by the background thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        if self.connection is not None:
            self.connection.close()

    def _open(self) -> None:
        try:
            assert self._identity is not None
            layout = opaque_layout(self._identity.result(), list(self._facts.values()))
            # The first attempt to connect is made here; later ones in a thread of the connection.
            connection = Connection(lambda: self._connect(layout), self._report, wait_s=0.0)
            if not self._keep(connection):
                return
            self.layout, self.epoch = layout, WeightsEpoch(layout.weights_digest)
            self._manager.open(connection.get, layout)
        except LayoutRefused as error:
            self._stop(str(error))
        except Exception as error:
            self._report("identifying the cache", error)
            self._stop(f"the cache cannot be identified: {error}")

    def _stop(self, reason: str) -> None:
        self._manager.stop(reason)
        self._keep(self._decline(reason))

    def _keep(self, connection: Connection) -> bool:
        """Use a connection from now on. False: `close` was called, and the connection is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self.connection = connection
        if closed:
            connection.close()
        return not closed
