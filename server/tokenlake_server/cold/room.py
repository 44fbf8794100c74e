"""The bound on the bytes of a cold tier, which holds although several nodes write at the same time.

A node counts what the index names, its own objects included. Other nodes hear of its objects with a delay, so what it
wrote within that delay, and what it is writing, takes at most its part of half of what is free: with W writers::

    unheard + under way + next object <= free / (2 W)

All writers together then write at most half of what was free before they hear of each other. A node announces itself in
a journal, and writes first when all others have heard that.
"""

from __future__ import annotations

import threading
from collections import deque

HIGH, LOW = 0.92, 0.85
"""From the share `HIGH` of the size on objects expire, until they take the share `LOW`."""


class Room:
    """Thread-safe."""

    def __init__(self, size: int, heard_s: float) -> None:
        """`size`: most bytes of all objects. `heard_s`: time after which other nodes have heard of an object."""
        self.size = size
        self._heard_s = heard_s
        self._lock = threading.Lock()
        self._writing = 0
        self._written: deque[tuple[float, int]] = deque()
        """Time and bytes of the objects that others have not heard of yet."""
        self._unheard = 0
        self._announced: float | None = None

    def announced(self, now: float) -> None:
        """Other nodes can read from now on that this one writes."""
        with self._lock:
            self._announced = now if self._announced is None else self._announced

    def ready(self, now: float) -> bool:
        """True when all others have heard that this node writes."""
        with self._lock:
            return self._ready(now)

    def _ready(self, now: float) -> bool:
        return self._announced is not None and now - self._announced >= self._heard_s

    def take(self, nbytes: int, named: int, writers: int, now: float) -> bool:
        """Take room for an object that is about to be written. `named`: bytes of the objects in the index; `writers`:
        other nodes that write. False where there is none."""
        with self._lock:
            while self._written and self._written[0][0] < now - self._heard_s:
                self._unheard -= self._written.popleft()[1]
            free = self.size - (named - self._unheard)
            ready = self._ready(now)
            fits = self._unheard + self._writing + nbytes <= free / (2 * (writers + 1))
            if ready and fits:
                self._writing += nbytes
            return ready and fits

    def gave_up(self, nbytes: int) -> None:
        """The object was not written."""
        with self._lock:
            self._writing -= nbytes

    def wrote(self, nbytes: int, now: float) -> None:
        """The object was written, and the index of this process has it."""
        with self._lock:
            self._writing -= nbytes
            self._unheard += nbytes
            self._written.append((now, nbytes))
