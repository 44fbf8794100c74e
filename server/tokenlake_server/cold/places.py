"""Opens the place of the setting `cold`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

from tokenlake_server.cold.base import Objects
from tokenlake_server.cold.directory import DirectoryObjects
from tokenlake_server.start.start_errors import ModuleMissing


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


def open_place(place: str) -> Place:
    """The objects at a place. Raises OSError where it cannot be used now."""
    if place.startswith("s3://"):
        from tokenlake_server.cold.s3 import S3Objects  # only where asked for: the library takes memory

        return S3Objects(place)
    return DirectoryObjects(Path(place))
