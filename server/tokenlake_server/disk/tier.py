"""The disk tier of a daemon: connects the devices of the setting `disk` with the rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenlake.config import Disk, ServerConfig
from tokenlake.core import events
from tokenlake.core.events import Event
from tokenlake.core.instructions import AbortFetch, DiskErase, DiskForget, DiskRead, DiskTrim, DiskWrite, Saved
from tokenlake.disk.slab import SlabUse
from tokenlake.errors import ConfigurationError
from tokenlake.metrics import Level, Metric
from tokenlake_server.disk.device import Device, DeviceState, Surroundings
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles, DirectoryInUse, Files
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.contents import Contents
from tokenlake_server.loop.driver import Driver, Sink
from tokenlake_server.start.standing_orders import StandingOrders

log = logging.getLogger(__name__)

WATCH_S = 0.5
"""Interval at which devices are watched for operations that take too long."""
DELIVER_S = 1.0
"""Interval at which a thread that waits for the control loop looks whether the daemon ends."""
LATE_S = 2.0
"""Seconds beyond `disk_save_s` for the writes that are under way."""


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"tokenlake_disk_{name}", help, "path", *labels, kind="gauge")


SERVING = _gauge("serving", "1 while the device of the disk tier is used, 0 while it is set aside")
CAPACITY = _gauge("capacity_bytes", "Bytes that segments may take on the device")
SLABS = _gauge("slab_bytes", "Bytes of the files with segments on the device, and of their tables")
QUEUE = _gauge("queued_segments", "Segments that wait to be read from the device or written to it")
BUDGET = _gauge(
    "budget_bytes", "Bytes that may be written to the device now, of the budget `disk_writes_per_day`; absent at 0"
)
SEGMENTS = _gauge("segments", "Segments on the device", "tenant", "slot_bytes")
USED = _gauge("used_bytes", "Bytes of the places of the segments on the device", "tenant", "slot_bytes")
LOST = _gauge(
    "lost_segments",
    "Segments that were lost when the device was opened last, because their records or files were damaged",
)
ERRORS = _gauge(
    "errors",
    "Operations on the device since the start that failed (`read`, `write`), and places that did not hold the segment "
    "that was expected (`mismatch`)",
    "kind",
)


class DiskTier:
    """The devices of one daemon. Without any, nothing happens. Used on the control loop; `close` is called from a
    thread."""

    def __init__(
        self,
        config: ServerConfig,
        arena: Arena,
        driver: Driver,
        loop: asyncio.AbstractEventLoop,
        abort: Callable[[AbortFetch], None],
        contents: Contents,
        orders: StandingOrders,
    ) -> None:
        """Locks the directories. `abort`: carries out the end of a transfer from another node. `contents` has the
        contents of segments, which are kept with their bytes; `orders` the evictions that a device missed. Raises
        `ConfigurationError` for a directory that cannot be used by this daemon."""
        self._driver = driver
        self._loop = loop
        self._abort = abort
        self._save_s = config.disk_save_s
        self._closing = False
        self._saved = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        around = Surroundings(
            config.cluster,
            config.node,
            DiskKeys(config.disk_keys),
            arena,
            driver.post,
            self._deliver,
            contents,
            orders,
            self._save_orders,
        )
        self._orders = orders
        self._saving: set[asyncio.Task[list[str]]] = set()
        opened = _locked(config.disk)
        self._devices = [
            Device(number, disk.path, disk.nbytes, _opener(disk.path, files), around)
            for number, (disk, files) in enumerate(zip(config.disk, opened, strict=True))
        ]
        carry_out: dict[type, Sink] = {
            DiskWrite: lambda order: self._devices[order.device].carry_out(order),
            DiskRead: lambda order: self._devices[order.device].carry_out(order),
            DiskErase: lambda order: self._devices[order.device].carry_out(order),
            DiskForget: lambda order: self._devices[order.device].forget(order),
            DiskTrim: lambda order: self._devices[order.device].forget(order),
            Saved: self._all_saved,
            AbortFetch: self._abort_any,
        }
        for kind, sink in carry_out.items():
            driver.carry_out(kind, sink)

    def start(self) -> None:
        """Begin to open the devices; the rules hear of each when it can be used. Raises `LimitReached`."""
        for device in self._devices:
            device.start()
        if self._devices:
            self._watch()

    def _watch(self) -> None:
        for device in self._devices:
            device.watch(time.monotonic())
        self._alarm = self._loop.call_later(WATCH_S, self._watch)

    def _abort_any(self, order: AbortFetch) -> None:
        for device in self._devices:
            device.abort(order.fetch)
        self._abort(order)

    def _deliver(self, event: Event) -> bool:
        handled = threading.Event()

        def handle() -> None:
            if not self._closing:
                self._driver.handle(event)
            handled.set()

        # A closed loop raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(handle)
            while not handled.wait(DELIVER_S):
                if self._closing:
                    return False
            return not self._closing
        return False

    def evicted(self, reached: Collection[int]) -> list[str]:
        """Segments are evicted by an order, and the rules have erased them from the devices with the numbers `reached`.
        All segments of the others are removed before these are used again, also of those that are not configured now;
        the caller saves the orders. Returns a text for each configured device where that may take long."""
        missed = [device for device in self._devices if device.number not in reached]
        self._orders.evict([device.path for device in missed])
        return [f"{device.path}: {problem}" for device in missed if (problem := device.remove())]

    def _save_orders(self) -> None:
        def begin() -> None:
            task = self._loop.create_task(self._orders.save())
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)

    @property
    def states(self) -> list[DeviceState]:
        """The state of each device, in the order of the setting."""
        return [device.state for device in self._devices]

    async def save(self, *, cold: bool) -> None:
        """Let the rules write segments that are in memory only, for at most `disk_save_s`. `cold`: there is a cold tier
        to write to."""
        if not self._save_s or not (cold or any(state.serving for state in self.states)):
            return
        began = time.monotonic()
        self._driver.handle(events.SaveRequested(self._save_s))
        try:
            await asyncio.wait_for(self._saved.wait(), self._save_s + LATE_S)
        except TimeoutError:
            log.warning("not all segments are saved after %.1f s: the devices are slow", time.monotonic() - began)

    def _all_saved(self, order: Saved) -> None:
        log.info("%d segments that were in memory only are saved", order.segments)
        self._saved.set()

    def stop(self) -> None:
        """Stop watching the devices. Called on the loop before `close`."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()

    def close(self) -> None:
        """Complete what the devices have begun, and release the directories. Blocks."""
        for device in self._devices:
            device.close()


def disk_gauges(
    states: Sequence[DeviceState], usage: Iterable[SlabUse], budgets: Mapping[int, float]
) -> Iterator[Level]:
    """The gauges of devices, for the metrics page. `states`: by number of the device; `budgets`: the bytes that may be
    written."""
    for number, left in budgets.items():
        yield Level(BUDGET, (states[number].path,), max(0.0, left))
    for use in usage:
        at = (states[use.device].path, use.tenant, str(use.slot_bytes))
        yield from (Level(SEGMENTS, at, use.segments), Level(USED, at, use.nbytes))
    for state in states:
        path = (state.path,)
        yield from (
            Level(SERVING, path, state.serving),
            Level(CAPACITY, path, state.capacity_bytes),
            Level(SLABS, path, state.slab_bytes),
            Level(QUEUE, path, state.queue),
            Level(LOST, path, state.lost),
            Level(ERRORS, (state.path, "read"), state.read_errors),
            Level(ERRORS, (state.path, "write"), state.write_errors),
            Level(ERRORS, (state.path, "mismatch"), state.mismatches),
        )


def _locked(disks: Sequence[Disk]) -> list[Files | None]:
    """The directories of `disks`, locked; None for one that cannot be read now. Raises `ConfigurationError`."""
    opened: list[Files | None] = []
    try:
        for disk in disks:
            opened.append(_lock(disk))
    except BaseException:
        for files in opened:
            if files is not None:
                files.close()
        raise
    return opened


def _lock(disk: Disk) -> Files | None:
    try:
        return DirectoryFiles(Path(disk.path))
    except DirectoryInUse as process:
        expected = f"a directory that no other process uses; {process} does"
    except (FileNotFoundError, NotADirectoryError):
        expected = "a directory that exists; create it, or leave it out"
    except PermissionError as error:
        expected = f"a directory that the daemon's user may write to ({error.strerror})"
    except OSError as error:
        # A device that failed does not keep the node from serving: it is set aside, and tried again.
        log.error("the disk tier at %s cannot be used: %s", disk.path, error.strerror)
        return None
    raise ConfigurationError("disk", str(disk), expected)


def _opener(path: str, first: Files | None) -> Callable[[], Files]:
    """A function that opens the directory. Its first call returns `first`, the directory as it is open already."""
    opened = [first] if first is not None else []
    return lambda: opened.pop() if opened else _opened(path)


def _opened(path: str) -> Files:
    """The directory, locked. Raises OSError."""
    try:
        return DirectoryFiles(Path(path))
    except DirectoryInUse as process:
        raise OSError(f"{process} uses the directory") from None
