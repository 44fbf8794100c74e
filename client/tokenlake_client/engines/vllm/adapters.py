"""LoRA adapters: the digest of an adapter is part of the keys of its requests.

The scheduler's side digests the files of a request's adapter when the request arrives. A rank computes with the copy of
the adapter that vLLM has loaded, which may be older: files can be replaced while vLLM has the adapter. So the plans of
loads and saves state the files that were digested, and a rank executes them only if vLLM has loaded these files. A
segment depends on all tokens before its end, so it is stored only if these files computed all of them::

    scheduler's side   request arrives: look at the files, digest them | keys | plan (number, state of the files, time)
    rank               vLLM loads the adapter: look at the files       |      | plan: the same files since that time?

Tokens in vLLM's own cache may be older than the request. vLLM tells adapters apart there by name and path, so tokens of
other files with this name and path may be among them.

Times are those of the machine's monotonic clock, which the scheduler's side and its ranks share.

vLLM is imported where it is used.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.weights import digest_of_changes, digest_of_directory, state_of_directory

ATTEMPTS = 3
"""The number of times that files which change while they are digested are digested."""
MAX_WAITING = 1024
"""Limit of the requests that wait until their adapter's files are looked at, and of those that wait for a digest."""
MAX_DIGESTS = 16384
"""Limit of the digests that are remembered."""
RETRY_S = 2.0
"""Seconds after a failed load until an adapter's segments are loaded again."""
MAX_FAILED = 1024
"""Limit of the adapters whose failed loads are remembered."""
MAX_NUMBERS = 64
"""Limit of the numbers of one adapter that are remembered; more of them count as unknown."""
MAX_ADAPTERS = 16384
"""Limit of the adapters that are remembered. vLLM gives an adapter that is loaded while it runs a new number each
time."""
_WRAPPED = "_tokenlake_watches_loads"
_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()
_watching_lock = threading.Lock()


class LoraRequest(Protocol):
    """The part of vLLM's `LoRARequest` that the connector uses."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The adapter of one request, as the plans for the ranks state it."""

    number: int
    """vLLM's number of the adapter."""
    files: str
    """The state of the files that were digested (`state_of_directory`)."""
    since: float = 0.0
    """A time before the first token of the request was computed, in seconds."""
    others: tuple[int, ...] = ()
    """Further numbers that the adapter has had in vLLM since that time. Tokens of the request may have been computed
    under them."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers of the adapter under which tokens of the request may have been computed."""
        return (self.number, *self.others)


class RequestAdapter:
    """The adapter of one request. Its digest becomes known in the background."""

    def __init__(self, number: int, name: str, path: str) -> None:
        self.number = number
        """vLLM's number of the adapter."""
        self.name = name
        self.path = path
        self.refused = False
        """True: the files cannot be read, so the pool does not serve the request."""
        self.files = ""
        """The state of the files that were digested; known with the digest."""
        self.digest: str | None = None
        """The adapter in the request's keys; None while it is not known."""
        self.since = 0.0
        self.others: tuple[int, ...] = ()

    @property
    def use(self) -> AdapterUse | None:
        """The adapter for the plans; None while its digest is not known."""
        return AdapterUse(self.number, self.files, self.since, self.others) if self.digest is not None else None


class CachedAdapters:
    """The adapters that the scheduler's side remembers: the numbers of those whose results vLLM's own cache may have,
    and the failed loads. For the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._emptied = 0.0
        """The time at which vLLM's own cache was last emptied."""
        self._numbers: OrderedDict[tuple[str, str], dict[int, None] | None] = OrderedDict()
        """By the name and path of an adapter, its numbers in vLLM since that time; None: unknown. The adapter that was
        used last stands last."""
        self._forgotten = False
        """True: the numbers of an adapter since that time were dropped, so those of an adapter that is not in
        `_numbers` are unknown."""
        self._failed: dict[tuple[int, str], float] = {}
        """By the number and the files of an adapter, the time of the last load that failed."""

    def load_failed(self, adapter: RequestAdapter) -> None:
        """Record that a load of segments of `adapter` has failed: perhaps vLLM has loaded other files."""
        self._failed.pop((adapter.number, adapter.files), None)
        self._failed[adapter.number, adapter.files] = self._clock()
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def may_load(self, adapter: RequestAdapter) -> bool:
        """False for some time after a load of segments of `adapter` has failed, because a failed load costs much more
        than a miss."""
        return self._clock() - self._failed.get((adapter.number, adapter.files), -math.inf) >= RETRY_S

    def emptied(self) -> None:
        """To be called when vLLM's own cache was emptied, before anything is computed."""
        self._emptied = self._clock()
        self._numbers.clear()
        self._forgotten = False

    def placed(self, adapter: RequestAdapter, *, cached: bool) -> bool:
        """To be called when vLLM has given blocks to the request of `adapter`, before anything is computed. `cached`:
        some of its tokens are in vLLM's own cache. Returns False if the numbers under which these were computed are
        unknown."""
        key = (adapter.name, adapter.path)
        numbers = self._numbers.setdefault(key, None if self._forgotten else {})
        self._numbers.move_to_end(key)
        if len(self._numbers) > MAX_ADAPTERS:
            self._numbers.popitem(last=False)
            self._forgotten = True
        if numbers is not None:
            numbers[adapter.number] = None
            if len(numbers) > MAX_NUMBERS:
                numbers = self._numbers[key] = None
        adapter.since = self._emptied if cached else self._clock()
        adapter.others = tuple(other for other in numbers or () if other != adapter.number) if cached else ()
        return not cached or numbers is not None


class Adapters:
    """Digests the adapters of an engine's requests, in threads of its own: one looks at the files, and one digests
    those whose digest is not known, so that no other request waits for it. For the scheduler's thread."""

    def __init__(self, options: Mapping[str, object], warn: Callable[[str], None]) -> None:
        """`options`: settings of the engine that change what an adapter computes (`options_of`). `warn`: logs a
        line."""
        self._options = options
        self._warn = warn
        self._looks: BackgroundQueue[tuple[LoraRequest, RequestAdapter]] = BackgroundQueue(
            lambda task: self._try(self._look, *task), "tokenlake-adapters", MAX_WAITING
        )
        self._unknown: BackgroundQueue[tuple[LoraRequest, RequestAdapter]] = BackgroundQueue(
            lambda task: self._try(self._digest, *task), "tokenlake-digests", MAX_WAITING
        )
        self._digests: dict[str, str] = {}
        """By the state of an adapter's files, their digest. Only the thread that digests files changes it."""

    def find(self, lora: LoraRequest) -> RequestAdapter:
        """The adapter of a new request; the fields of the result are set later. Never waits."""
        adapter = RequestAdapter(lora.lora_int_id, lora.lora_name, lora.lora_path)
        if lora.lora_name:
            self._submit(self._looks, lora, adapter)
        else:
            self._refuse(adapter, "requests for a LoRA adapter without a name")
        return adapter

    def close(self) -> None:
        """End the threads."""
        for queue in (self._looks, self._unknown):
            queue.close(1.0, drain=False)

    def _submit(
        self, queue: BackgroundQueue[tuple[LoraRequest, RequestAdapter]], lora: LoraRequest, adapter: RequestAdapter
    ) -> None:
        if not queue.submit((lora, adapter)):
            self._refuse(adapter, f"LoRA adapter {lora.lora_name[:100]!r}: too many requests wait for its digest")

    def _try(
        self, find: Callable[[LoraRequest, RequestAdapter], None], lora: LoraRequest, adapter: RequestAdapter
    ) -> None:
        try:
            find(lora, adapter)
        except Exception as error:
            self._refuse(adapter, f"LoRA adapter {lora.lora_name[:100]!r}: its files cannot be read: {error}")

    def _look(self, lora: LoraRequest, adapter: RequestAdapter) -> None:
        files = state_of_directory(directory_of(lora.lora_path))
        digest = self._digests.get(files)
        if digest is not None:
            self._found(lora, adapter, files, digest)
        else:
            self._submit(self._unknown, lora, adapter)

    def _digest(self, lora: LoraRequest, adapter: RequestAdapter) -> None:
        directory = directory_of(lora.lora_path)
        for _ in range(ATTEMPTS):
            files = state_of_directory(directory)
            digest = self._digests.get(files) or digest_of_directory(directory)
            if state_of_directory(directory) == files:
                self._digests[files] = digest
                if len(self._digests) > MAX_DIGESTS:
                    del self._digests[next(iter(self._digests))]
                self._found(lora, adapter, files, digest)
                return
        raise LayoutRefused(f"the files in {directory} change")

    def _found(self, lora: LoraRequest, adapter: RequestAdapter, files: str, digest: str) -> None:
        changes = {
            **self._options,
            **({"is_3d_lora_weight": True} if getattr(lora, "is_3d_lora_weight", False) else {}),
        }
        # The digest is set last: the scheduler's thread reads the state of the files once it sees the digest.
        adapter.files = files
        adapter.digest = digest_of_changes(digest, changes)

    def _refuse(self, adapter: RequestAdapter, reason: str) -> None:
        self._warn(f"served without the pool: {reason}")
        adapter.refused = True


@dataclass(frozen=True, slots=True)
class _Loaded:
    files: str | None
    """The state of the files that vLLM loaded an adapter from; None: unknown."""
    since: float
    """The time from which on vLLM has computed with these files under the adapter's number."""


class LoadedAdapters:
    """The adapters that vLLM has loaded on this rank. Several threads may use this object."""

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`warn`: logs a line."""
        self._warn = warn
        self._clock = clock
        self._lock = threading.Lock()
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()
        """By vLLM's number of an adapter; the one that was used last stands last."""
        self._forgotten = -1
        """The highest number whose adapter was dropped from `_loaded`: vLLM may have loaded other files under a number
        up to this one that is not in `_loaded`."""
        with _watching_lock:
            _watching.add(self)

    def loaded(self, number: int, files: str | None) -> None:
        """Record that vLLM has loaded the adapter `number` from files in this state; None: unknown."""
        with self._lock:
            before = self._known(number)
            if before is None and number > self._forgotten:
                # Nothing was computed under this number before.
                self._record(number, _Loaded(files, -math.inf))
            elif before is None or files is None or before.files != files:
                self._record(number, _Loaded(files, self._clock()))

    def may_load(self, use: AdapterUse | None) -> bool:
        """True if segments may be loaded that were computed with this adapter, also if vLLM has not loaded it yet: vLLM
        loads the adapter before the request computes. From then on vLLM's own cache has tokens of these files."""
        if use is None:
            return True
        with self._lock:
            loaded = self._known(use.number)
            if loaded is None and use.number > self._forgotten:
                loaded = self._record(use.number, _Loaded(use.files, -math.inf))
        return self._agrees(loaded is not None and loaded.files == use.files, use)

    def may_store(self, use: AdapterUse | None) -> bool:
        """True if all tokens of the request, up to those of this step, were computed with this adapter."""
        if use is None:
            return True
        with self._lock:
            numbers = {number: self._known(number) for number in use.numbers}
            # With a number that vLLM has not loaded, nothing was computed.
            agrees = numbers[use.number] is not None and all(
                number > self._forgotten if one is None else one.files == use.files and one.since < use.since
                for number, one in numbers.items()
            )
        return self._agrees(agrees, use)

    def _known(self, number: int) -> _Loaded | None:
        """The adapter of a number that is about to be used; None if it is not in `_loaded`. The caller holds the
        lock."""
        loaded = self._loaded.get(number)
        if loaded is not None:
            self._loaded.move_to_end(number)
        return loaded

    def _record(self, number: int, loaded: _Loaded) -> _Loaded:
        """Set the adapter of a number, and drop the one that was not used for the longest time beyond
        `MAX_ADAPTERS`. The caller holds the lock."""
        self._loaded[number] = loaded
        self._loaded.move_to_end(number)
        if len(self._loaded) > MAX_ADAPTERS:
            dropped, _ = self._loaded.popitem(last=False)
            self._forgotten = max(self._forgotten, dropped)
        return loaded

    def _agrees(self, agrees: bool, use: AdapterUse) -> bool:
        if not agrees:
            self._warn(
                f"served without the pool: LoRA adapter {use.number}: its files changed after vLLM loaded them, or "
                "after it computed cached tokens with them, or vLLM has loaded too many adapters since; load it again, "
                "in place or under another number, and then reset the caches"
            )
        return agrees


def directory_of(path: str) -> Path:
    """The directory of the adapter that a request names, as vLLM finds it. Raises an error if it is not on this
    machine."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    # vLLM takes another text for a name at the Hub, and downloads the adapter when it loads it.
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise LayoutRefused("the directory of ModelScope is not known; give the path of the adapter's directory")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def options_of(lora_config: Any, dtype: Any) -> dict[str, object]:
    """By name, the settings of vLLM that change what its adapters compute; a setting with vLLM's default is left out.
    `dtype`: that of the model."""
    defaults = {"lora_dtype": dtype, "target_modules": None, "enable_moe_shared_loras": False}
    found = {name: getattr(lora_config, name, default) for name, default in defaults.items()}
    return {name: str(value) for name, value in found.items() if value not in (defaults[name], "auto")}


def watch_loads() -> bool:
    """From now on, record each adapter that vLLM loads in this process in all `LoadedAdapters`. False: this version of
    vLLM lacks the method that loads adapters, so they cannot be recorded. A second call does nothing."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager
    except ImportError:
        return False
    original = getattr(WorkerLoRAManager, "_load_adapter", None)
    if original is None:
        return False
    if getattr(original, _WRAPPED, False):
        return True

    @functools.wraps(original)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        before = _state(lora_request)
        result = original(self, lora_request)
        # Files that changed while vLLM read them are in a state of their own.
        after = _state(lora_request)
        with _watching_lock:
            watching = list(_watching)
        for loaded in watching:
            loaded.loaded(lora_request.lora_int_id, after if before in (after, None) else None)
        return result

    setattr(load_adapter, _WRAPPED, True)
    WorkerLoRAManager._load_adapter = load_adapter
    return True


def _state(lora: LoraRequest) -> str | None:
    try:
        return state_of_directory(directory_of(lora.lora_path))
    except Exception:
        return None
