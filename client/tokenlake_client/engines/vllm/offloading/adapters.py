"""Digests of LoRA adapters. Imports no engine."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tokenlake_client.weights import digest_of_directory

__all__ = ["AdapterDigests"]


class AdapterDigests:
    """The digests of adapters by their contents, computed in a background thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-adapter")
        self._known: dict[Hashable, Future[str]] = {}

    def digest(self, name: Hashable, directory: str, *, changed: bool = False) -> Future[str]:
        """The digest of the adapter that the engine calls `name`. The future raises `LayoutRefused` where `directory`
        holds no adapter. `changed`: the engine loads the adapter again."""
        if name not in self._known or changed:
            self._known[name] = self._thread.submit(digest_of_directory, Path(directory))
        return self._known[name]

    def close(self) -> None:
        """End the background thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
