"""`TokenLakeL2`, an L2 adapter of LMCache's multi-process server.

LMCache submits tasks in threads of its own, and polls a descriptor for each kind of task. A thread of the adapter for
each kind executes them in order::

    LMCache   submit ------> event on the descriptor, then query: the result
    adapter      |--- lookup: the objects that the pool has, leased until LMCache unlocks them
                 |--- load:   copies from the arena into LMCache's memory
                 |--- store:  copies from LMCache's memory into the arena
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.page_counts import PageCounters, PageCounts
from tokenlake_client.engines.common.pages import PageKind, Parts
from tokenlake_client.engines.common.reports import Reports
from tokenlake_client.engines.common.status import PoolStatus
from tokenlake_client.engines.lmcache.identity import ObjectForm, form_of, layout_of, name_of
from tokenlake_client.engines.lmcache.metrics import AdapterSeries
from tokenlake_client.engines.lmcache.objects import ObjectStore
from tokenlake_client.engines.lmcache.settings import read_settings
from tokenlake_client.pool import Pool

logger = logging.getLogger("lmcache.tokenlake")

MAX_FORMS = 64
"""Limit of the forms of objects of one server, each of which has a connection. Objects of further forms are misses."""
MAX_WAITING = 1024
"""Limit of the tasks of one kind that wait; further ones fail at once."""
MAX_RESULTS = 4096
"""Limit of the results of one kind that LMCache has not fetched. LMCache fetches no result of a request that it
aborts."""
CONNECT_S = 10.0
"""Seconds for which a store waits for the first connection, whose digest may read the model's files."""


class _Tasks:
    """The tasks of one kind, and their results. Thread-safe."""

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._results: dict[int, Any] = {}
        self._closed = False
        self.notifier = create_event_notifier()
        self.queue: BackgroundQueue[Callable[[], None]] = BackgroundQueue(
            lambda task: task(), f"tokenlake-{kind}", MAX_WAITING
        )

    def begin(self, work: Callable[[], Any], failed: Any) -> int:
        """Execute `work`, which does not raise, in the background. `failed`: the result where it cannot wait."""
        number = next(self._numbers)
        if not self.queue.submit(lambda: self._end(number, work())):
            self._end(number, failed)
        return number

    def _end(self, number: int, result: Any) -> None:
        with self._lock:
            if self._closed:
                return
            self._results[number] = result
            while len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]
            self.notifier.notify()

    def take(self, number: int) -> Any:
        """The result of a task, once; None before its end."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """All results, once."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """End the thread after the task under way, and close the descriptor. Idempotent."""
        self.queue.close(CONNECT_S, drain=False)
        with self._lock:
            if not self._closed:
                self._closed = True
                self.notifier.close()


class TokenLakeL2(L2AdapterInterface):  # type: ignore[misc]
    """The pool as an L2 adapter of LMCache. No method raises after the start; without the pool, lookups are misses and
    objects are not stored."""

    def __init__(self, params: Mapping[str, object], **ignored: object) -> None:
        """`params`: LMCache's `adapter_params`. Raises `ConfigurationError` for an unknown or invalid setting."""
        super().__init__()
        self.settings = read_settings(params, os.environ)
        self.counters = PageCounters()
        self._reports = Reports(logger, self.counters, prefix="TokenLake: ")
        self._status = PoolStatus(logger)
        self._lock = threading.Lock()
        self._forms: dict[ObjectForm, ObjectStore] = {}
        self._layouts = threading.Lock()
        self._series: AdapterSeries | None = None
        try:
            self._series = AdapterSeries(self.counters)
        except Exception as error:
            # A second adapter of one server has its counts in the server's status only.
            self._reports.warn(f"no counts on the metrics page: {error}")
        self._lookups, self._loads, self._stores = (_Tasks(kind) for kind in ("lookup", "load", "store"))

    @property
    def counts(self) -> PageCounts:
        """A copy of the counts."""
        return self.counters.read()

    def get_store_event_fd(self) -> int:
        """LMCache's hook: the descriptor of stores."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """LMCache's hook: the descriptor of lookups."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """LMCache's hook: the descriptor of loads."""
        return int(self._loads.notifier.fileno())

    # -- looking up

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """LMCache's hook: look up objects, and lease those that the pool has."""

        def form(index: int) -> ObjectForm:
            described = group_layout_descs[keys[index].object_group_id]
            return form_of(keys[index], described.shapes, described.dtypes)

        return self._lookups.begin(lambda: self._look_up(keys, form), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """LMCache's hook: the bits of the objects that were found; None before the end of the lookup."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """LMCache's hook: end the leases of objects. Each lease ends after `lease_s` in any case."""
        try:
            names = [name_of(key) for key in keys]
            with self._lock:
                forms = list(self._forms.items())
            for form, store in forms:
                own = [
                    name
                    for name, key in zip(names, keys, strict=True)
                    if (key.model_name, key.object_group_id) == (form.model, form.group)
                ]
                store.unlock(own)
        except Exception as error:
            self._reports.failure("unlocking objects", error)

    def _look_up(self, keys: Sequence[Any], form: Callable[[int], ObjectForm]) -> Any:
        found = Bitmap(len(keys))

        def lock(store: ObjectStore, indices: list[int], names: list[str]) -> None:
            for index, hit in zip(indices, store.lock(names), strict=True):
                if hit:
                    found.set(index)
            self._status.update(store.connection.pool, silent=False)

        self._each_form("looking up objects", keys, form, lock)
        return found

    # -- loading and storing

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """LMCache's hook: load objects into its memory."""
        return self._loads.begin(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """LMCache's hook: the bits of the objects that were loaded; None before the end of the load."""
        return self._loads.take(task_id)

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """LMCache's hook: store objects from its memory."""
        return self._stores.begin(lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """LMCache's hook: the results of the stores that have ended. A store succeeds if the pool has all objects."""
        return self._stores.take_all()

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        loaded = Bitmap(len(keys))

        def load(store: ObjectStore, indices: list[int], names: list[str]) -> None:
            places = [_place(objects[index]) for index in indices]
            for index, done in zip(indices, store.load_each(names, places), strict=True):
                if done:
                    loaded.set(index)

        self._each_form("loading objects", keys, lambda index: _form_in_memory(keys, objects, index), load)
        return loaded

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        done: list[int] = []

        def save(store: ObjectStore, indices: list[int], names: list[str]) -> None:
            places = [_place(objects[index]) for index in indices]
            store.connection.get(CONNECT_S)
            stored = store.save(names, places)
            done.extend(index for index, each in zip(indices, stored, strict=True) if each)

        self._each_form("storing objects", keys, lambda index: _form_in_memory(keys, objects, index), save)
        nbytes = sum(size for index in done for _, size in _place(objects[index]))
        return L2StoreResult(len(done) == len(keys), nbytes)

    def _each_form(
        self,
        operation: str,
        keys: Sequence[Any],
        form: Callable[[int], ObjectForm],
        do: Callable[[ObjectStore, list[int], list[str]], None],
    ) -> None:
        """Call `do` for the objects of each form: with their indices into `keys`, and their names. Never raises."""
        try:
            by_form: dict[ObjectForm, list[int]] = {}
            for index in range(len(keys)):
                by_form.setdefault(form(index), []).append(index)
            for each, indices in by_form.items():
                names = [name_of(keys[index]) for index in indices]
                do(self._store_of(each), indices, names)
        except Exception as error:
            self._reports.failure(operation, error)

    # -- connections

    def _store_of(self, form: ObjectForm) -> ObjectStore:
        with self._lock:
            kept = self._forms.get(form)
            if kept is None:
                if len(self._forms) >= MAX_FORMS:
                    raise ValueError(f"LMCache has objects of more than {MAX_FORMS} forms")
                connection = Connection(lambda: self._connect(form), self._reports.failure, at_once=False, wait_s=0.0)
                # Objects of other groups stand for the same tokens as those of the first one.
                kind = PageKind(form.group, 0 if form.group else self.settings.chunk_tokens)
                kept = self._forms[form] = ObjectStore(
                    kind, connection, lambda: None, self.settings, self.counters, self._reports.failure
                )
        return kept

    def _connect(self, form: ObjectForm) -> Pool:
        with self._layouts:
            layout = layout_of(form, lmcache.__version__, self.settings)
        return self.settings.connect(layout)

    # -- the rest of LMCache's interface

    def report_status(self) -> dict[str, Any]:
        """LMCache's hook: the state of the connections, and the counts."""
        with self._lock:
            pools = [kept.connection.pool for kept in self._forms.values()]
        connected = sum(pool is not None and pool.connected for pool in pools)
        counts = dataclasses.asdict(self.counts)
        return {"is_healthy": True, "type": "TokenLakeL2", "connected": connected, "forms": len(pools), **counts}

    def close(self) -> None:
        """Release all leases, and leave the session. Idempotent."""
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()
        with self._lock:
            forms = list(self._forms.values())
        series, self._series = self._series, None
        if series is not None:
            series.close()
        for store in forms:
            store.close()


def _form_in_memory(keys: Sequence[Any], objects: Sequence[Any], index: int) -> ObjectForm:
    return form_of(keys[index], objects[index].get_shapes(), objects[index].get_dtypes())


def _place(held: Any) -> Parts:
    """The place of an object in LMCache's memory. Another size than that of its form is found before a copy."""
    return [(int(held.data_ptr), int(held.get_size()))]
