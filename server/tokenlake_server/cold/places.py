"""Opens the place of the setting `cold`."""

from __future__ import annotations

import importlib.util
import stat
import threading
from pathlib import Path
from typing import Protocol

from tokenlake.errors import ConfigurationError
from tokenlake_server.cold.base import Objects
from tokenlake_server.cold.directory import DirectoryObjects
from tokenlake_server.start.start_errors import ModuleMissing

ASKED_S = 2.0
"""Seconds for which the start of a daemon waits for the place."""


class Place(Objects, Protocol):
    """A place that was opened."""

    @property
    def poll_s(self) -> float:
        """Interval at which a node asks for what others did."""

    @property
    def late_s(self) -> float:
        """Time that may pass until another machine sees a new object in a listing."""

    def close(self) -> None:
        """Release the place."""


def require_module(place: str) -> None:
    """Raises `ModuleMissing` where the library for a place is not installed."""
    if place.startswith("s3://") and importlib.util.find_spec("obstore") is None:
        raise ModuleMissing("cold", place, "obstore", "s3")


def require_place(place: str) -> None:
    """Raises `ConfigurationError` for a place that cannot be one. One that is away or hangs now can be one: this
    returns within `ASKED_S`."""
    require_module(place)
    if place.startswith("s3://"):
        return
    found: list[OSError | int] = []
    thread = threading.Thread(target=lambda: found.append(_mode(place)), daemon=True)
    thread.start()
    thread.join(ASKED_S)
    if found and isinstance(found[0], FileNotFoundError | NotADirectoryError):
        raise ConfigurationError("cold", place, "a directory that exists; create it, or leave it out")
    if found and isinstance(found[0], int) and not stat.S_ISDIR(found[0]):
        raise ConfigurationError("cold", place, "a directory")


def _mode(path: str) -> OSError | int:
    try:
        return Path(path).stat().st_mode
    except OSError as error:
        return error


def open_place(place: str) -> Place:
    """The objects at a place. Raises OSError where it cannot be used now."""
    if place.startswith("s3://"):
        from tokenlake_server.cold.s3 import S3Objects  # only where asked for: the library takes memory

        return S3Objects(place)
    return DirectoryObjects(Path(place))
