"""Counts that several threads add to."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Counters(Generic[C]):
    """The counts of one engine. Each integration declares its counts as a dataclass of numbers. Thread-safe."""

    def __init__(self, counts: type[C]) -> None:
        """`counts`: the dataclass of the counts; each field is a number whose default is its first value."""
        self._lock = threading.Lock()
        self._counts: Any = counts()

    def add(self, **amounts: float) -> None:
        """Add each amount to the count of that name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def read(self) -> C:
        """A copy of all counts, taken at one moment."""
        with self._lock:
            copy: C = dataclasses.replace(self._counts)
            return copy
