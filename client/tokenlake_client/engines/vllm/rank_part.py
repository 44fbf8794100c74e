"""What both connectors do alike on a rank. Imports no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import Counts
from tokenlake_client.engines.vllm.save_worker import Save, SaveWriter
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings


class RankPart:
    """The parts of one rank: its session, its copies, the thread that stores segments and the one that loads them."""

    _loads: BackgroundQueue[Any]

    def __init__(
        self,
        session: RankSession,
        copy: Any,
        settings: EngineSettings,
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        adapters: LoadedAdapters | None,
        ended: Callable[[Save, int, float], None] = lambda save, nbytes, seconds: None,
    ) -> None:
        """`copy`: see `copies`; None where the rank cannot read and write vLLM's cache. `report` is called with the
        operation that failed and its error. `adapters`: the LoRA adapters that vLLM has loaded on this rank; None:
        requests have none. `ended`: as of `SaveWriter`."""
        self._session = session
        self._copy = copy
        self._settings = settings
        self._counters = counters
        self._report = report
        self._adapters = adapters or LoadedAdapters(lambda line: None)
        self._saves = SaveWriter(
            copy, counters, report, queue=settings.write_queue, patience_s=settings.write_patience_s, ended=ended
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all segments are stored; False when `timeout` seconds were not enough."""
        return self._saves.flush(timeout)

    def sleep(self, timeout: float = 5.0) -> None:
        """vLLM is about to give up the memory of its cache: store the waiting segments, for at most `timeout` seconds,
        end all loads, and release the page locks of the arena. Raises the errors of the device, and `Unreachable` where
        a load, which vLLM has waited for, has not ended by then."""
        self._saves.drain(timeout)
        self._end_loads(timeout)
        if self._copy is not None:
            self._copy.release_locks()

    def wake(self) -> None:
        """The cache has memory again, at the same addresses: retake the page locks."""
        if self._copy is not None:
            self._copy.take_locks()

    def close(self, timeout: float = 5.0) -> None:
        """Store the waiting segments, for at most `timeout` seconds, and leave the session."""
        self._saves.close(timeout)
        self._loads.close(timeout, drain=False)
        self._session.close()

    def _end_loads(self, timeout: float) -> None:
        raise NotImplementedError
