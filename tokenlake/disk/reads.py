"""The queue of reads from each device of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
READS = 4
"""Reads that one device has under way at a time: a device gives its full rate with them, and a further one would only
delay these."""
READ_SEGMENTS, READ_BYTES = 32, 64 << 20
"""Limits of one read; it has at least one segment."""
RATE_WEIGHT = 0.2
"""Weight of the newest read in the running mean of a device's rate."""
LEAST_RATE = 1e6
"""Minimum of that mean, in bytes per second."""
MEASURED_BYTES = 1 << 20
"""Minimum bytes of a read that counts for the rate."""


class Readable(Protocol):
    """What is read from: a device of the disk tier, or the cold tier."""

    read_rate: float
    """Bytes per second."""


class ReadQueue(Generic[T]):
    """Reads that wait for their device, in order, and the number of those under way."""

    def __init__(self, devices: Mapping[int, Readable], reads: int = READS) -> None:
        """`devices`: those in use, by number. The queue changes their read rates. `reads`: how many one device has
        under way at a time."""
        self._devices = devices
        self._reads = reads
        self._waiting: dict[int, dict[T, int]] = {}
        """By device: the bytes of each read that waits, the oldest first."""
        self._under_way: Counter[int] = Counter()
        self._nbytes: Counter[int] = Counter()
        """By device: the bytes of the reads that wait or are under way."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        """Yields the reads that wait."""
        for waiting in self._waiting.values():
            yield from waiting

    def add(self, device: int, read: T, nbytes: int) -> None:
        """Let a read wait for its device."""
        self._waiting.setdefault(device, {})[read] = nbytes
        self._nbytes[device] += nbytes

    def grow(self, device: int, read: T, nbytes: int) -> None:
        """Add bytes to a read that waits."""
        self._waiting[device][read] += nbytes
        self._nbytes[device] += nbytes

    def drop(self, device: int, read: T) -> None:
        """Take out a read that waits."""
        self._nbytes[device] -= self._waiting[device].pop(read)

    def take(self, device: int) -> T | None:
        """Returns the next read that may start, which is under way from now on; None if there is none."""
        waiting = self._waiting.get(device)
        if not waiting or self._under_way[device] >= self._reads:
            return None
        read = next(iter(waiting))
        del waiting[read]
        self._under_way[device] += 1
        return read

    def under_way(self, device: int) -> int:
        """The number of reads of a device that are under way."""
        return self._under_way[device]

    def ended(self, device: int, nbytes: int, seconds: float, came: int) -> None:
        """A read of `nbytes` has ended after `seconds`. `came`: the bytes that tell the rate; 0: it does not."""
        beside = self._under_way[device]
        self._under_way[device] -= 1
        self._nbytes[device] -= nbytes
        known = self._devices.get(device)
        if known is not None and came >= MEASURED_BYTES:
            rate = beside * came / max(seconds, 1e-6)
            known.read_rate = max(LEAST_RATE, known.read_rate + RATE_WEIGHT * (rate - known.read_rate))

    def predict_s(self, nbytes: int) -> float:
        """Returns the expected seconds until `nbytes` more are read, behind all reads that wait or are under way."""
        rate = sum(device.read_rate for device in self._devices.values())
        return (self._nbytes.total() + nbytes) / max(LEAST_RATE, rate)

    def check_integrity(self) -> None:
        """Raises AssertionError when bytes or counts are negative, or a device is idle while reads wait."""
        for device, waiting in self._waiting.items():
            assert self._nbytes[device] >= sum(waiting.values())
            assert 0 <= self._under_way[device] <= self._reads
            assert not waiting or self._under_way[device] == self._reads
