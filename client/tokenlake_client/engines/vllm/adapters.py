"""LoRA adapters: the digest of an adapter is part of the keys of its requests.

The scheduler's side digests the files of a request's adapter when the request arrives. A rank computes with the copy of
the adapter that vLLM has loaded, which may be older: files can be replaced while vLLM has the adapter. So the plans of
loads and saves state the files that were digested, and a rank executes them only if vLLM has loaded these files::

    scheduler's side     request arrives: look at the files, digest them | keys | plan (number, state of the files)
    rank                 vLLM loads the adapter: look at the files       |      | plan: the same files? then execute

vLLM is imported where it is used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.weights import digest_of_changes, digest_of_directory, state_of_directory

__all__ = ["AdapterUse", "Adapters", "LoadedAdapters", "LoraRequest", "RequestAdapter", "options_of", "watch_loads"]

ATTEMPTS = 3
"""The number of times that files which change while they are digested are digested."""
_WRAPPED = "_tokenlake_watches_loads"
_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()


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


class RequestAdapter:
    """The adapter of one request. Its digest becomes known in the background."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused = False
        """True: the files cannot be read, so the pool does not serve the request."""
        self.digest: str | None = None
        """The adapter in the request's keys; None while it is not known."""
        self.use: AdapterUse | None = None
        """Known with the digest."""
        self.replaced = False
        """True: other files had the adapter's name and path before. vLLM's own cache may hold their results, because it
        tells adapters apart by name and path only."""


class Adapters:
    """Digests the adapters of an engine's requests, in a thread of its own. For the scheduler's thread."""

    def __init__(self, options: Mapping[str, object], warn: Callable[[str], None]) -> None:
        """`options`: settings of the engine that change what an adapter computes (`options_of`). `warn`: logs a
        line."""
        self._options = options
        self._warn = warn
        self._queue: BackgroundQueue[tuple[LoraRequest, RequestAdapter]] = BackgroundQueue(
            lambda task: self._find(*task), "tokenlake-adapters"
        )
        self._digests: dict[str, str] = {}
        """By the state of an adapter's files, their digest."""
        self._cached: dict[tuple[str, str], str] = {}
        """By the name and path of an adapter, the state of the files of its first request since vLLM's own cache was
        emptied."""

    def find(self, lora: LoraRequest) -> RequestAdapter:
        """The adapter of a new request; the fields of the result are set later. Never waits."""
        adapter = RequestAdapter(lora.lora_name)
        if not lora.lora_name:
            self._refuse(adapter, "requests for a LoRA adapter without a name")
        elif not self._queue.submit((lora, adapter)):
            self._refuse(adapter, f"LoRA adapter {lora.lora_name[:100]!r}: no thread can be started")
        return adapter

    def cache_emptied(self) -> None:
        """To be called when vLLM's own cache was emptied."""
        self._cached = {}

    def close(self) -> None:
        """End the thread."""
        self._queue.close(1.0, drain=False)

    def _find(self, lora: LoraRequest, adapter: RequestAdapter) -> None:
        try:
            files, digest = self._digest(directory_of(lora.lora_path))
        except Exception as error:
            self._refuse(adapter, f"LoRA adapter {lora.lora_name[:100]!r}: its files cannot be read: {error}")
            return
        changes = {
            **self._options,
            **({"is_3d_lora_weight": True} if getattr(lora, "is_3d_lora_weight", False) else {}),
        }
        first = self._cached.setdefault((lora.lora_name, lora.lora_path), files)
        adapter.replaced = first != files
        adapter.use = AdapterUse(lora.lora_int_id, files)
        # The digest is set last: the scheduler's thread reads the other fields once it sees the digest.
        adapter.digest = digest_of_changes(digest, changes)

    def _digest(self, directory: Path) -> tuple[str, str]:
        """The state of the adapter's files and their digest."""
        for _ in range(ATTEMPTS):
            files = state_of_directory(directory)
            digest = self._digests.get(files) or digest_of_directory(directory)
            if state_of_directory(directory) == files:
                self._digests[files] = digest
                return files, digest
        raise LayoutRefused(f"the files in {directory} change")

    def _refuse(self, adapter: RequestAdapter, reason: str) -> None:
        self._warn(f"served without the pool: {reason}")
        adapter.refused = True


class LoadedAdapters:
    """The adapters that vLLM has loaded on this rank. Several threads may use this object."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn`: logs a line."""
        self._warn = warn
        self._files: dict[int, str | None] = {}
        """By vLLM's number of an adapter, the state of the files that it was loaded from; None: unknown."""
        _watching.add(self)

    def loaded(self, number: int, files: str | None) -> None:
        """Record that vLLM has loaded the adapter `number` from files in this state; None: unknown."""
        self._files[number] = files

    def may_load(self, use: AdapterUse | None) -> bool:
        """May segments be loaded that were computed with this adapter? True also if vLLM has not loaded it yet: it
        loads the adapter before the request computes."""
        return use is None or use.number not in self._files or self._same(use)

    def may_store(self, use: AdapterUse | None) -> bool:
        """Were the results of the step computed with this adapter?"""
        return use is None or self._same(use)

    def _same(self, use: AdapterUse) -> bool:
        same = self._files.get(use.number) == use.files
        if not same:
            self._warn(
                f"served without the pool: LoRA adapter {use.number}: its files changed after vLLM loaded them; load "
                "it again, in place or under another number"
            )
        return same


def directory_of(path: str) -> Path:
    """The directory of the adapter that a request names, as vLLM finds it. Raises an error if it is not on this
    machine."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    # vLLM takes another text for a name at the Hub, and downloads the adapter when it loads it.
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
        for loaded in list(_watching):
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
