"""Orders of operators that outlive the daemon: weights that were retired, and evictions that a device has missed.

The orders are kept in a file of the state directory (else beside the local socket) and in each directory of the disk
tier. A file has two equal copies::

    | magic, version, bytes, digest | orders, msgpack | ... 512 KiB | the same again |

Its space is allocated when the daemon starts, so that a later order needs none. The copies are written and synced one
after the other: a process that is killed, or a damaged sector, leaves one of them. The orders are those of all files
together.

Each file names the time of the last eviction that its directory has carried out. A directory whose file names an
earlier one than another file was set aside, or not in the setting `disk`, while segments were evicted: all of its
segments are removed before one is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from tokenlake.errors import LimitReached
from tokenlake.metrics import Level, Metric

log = logging.getLogger(__name__)

FILE = "orders"
"""Name of the file in a directory of the disk tier."""
MAX_RETIRED = 1024
"""Limit of the digests of changed weights that are remembered for each tenant; the oldest is forgotten."""
MAX_ALL_RETIRED = 8192
"""The same for all tenants together, each of which has an equal part."""
COPY_BYTES = 512 << 10
ANSWER_S = 5.0
"""Seconds in which a file has to be written."""

_MAGIC = b"tlorder1"
_HEAD = struct.Struct("<8sQI16s")

FORGOTTEN = Metric(
    "tokenlake_forgotten_retired_weights",
    "Digests of retired weights that were forgotten since the start, because a tenant has too many",
    kind="gauge",
)
WAITING = Metric(
    "tokenlake_disk_waiting_removals",
    "1 while the segments of the device, one of the setting `disk`, wait to be removed, because it missed an eviction",
    "path",
    kind="gauge",
)


class _Content(msgspec.Struct, array_like=True):
    """The content of a file."""

    version: int = 0
    retired: dict[str, list[bytes]] = {}
    """By tenant, digests of the digests of weights, the oldest first."""
    evicted: int = 0
    """The time of the last eviction, in nanoseconds; in a directory of the disk tier, of the last one that its segments
    have followed."""


_DECODER = msgspec.msgpack.Decoder(_Content)
"""Made once: msgspec ends the process where two threads are the first to use a type at the same time."""


class StandingOrders:
    """The orders of one daemon. Its methods may be called from any thread and do not block, but for `load` and `take`;
    `save` is called on the loop."""

    def __init__(self, home: Path, directories: Sequence[str] = (), tenants: int = 1) -> None:
        """`home`: the file that is always written; `directories`: those of the disk tier; `tenants`: their number."""
        self._own = _File(home)
        self._directories = {each: _File(Path(each, FILE)) for each in directories}
        self._files = [self._own, *self._directories.values()]
        self._most = max(1, min(MAX_RETIRED, MAX_ALL_RETIRED // tenants))
        self._lock = threading.Lock()
        """Guards the fields below, and `evicted` of the files."""
        self._version = 0
        self._retired: dict[str, OrderedDict[bytes, None]] = {}
        self._evicted = 0
        """The time of the last eviction, in nanoseconds."""
        self._forgotten = 0
        self.on_evicted: Callable[[int], None] = lambda evicted: None
        """Called on the loop with the time of each eviction, which memory has followed."""

    def load(self) -> None:
        """Read the orders of earlier daemons, for at most `ANSWER_S`. A file that cannot be read is logged, and tried
        again by `take`. Raises `LimitReached` where no threads can be started."""
        threads = [threading.Thread(target=self._take, args=(file,), daemon=True) for file in self._files]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:
            raise LimitReached(f"the orders of operators cannot be read: {error}") from error
        until = time.monotonic() + ANSWER_S
        for thread, file in zip(threads, self._files, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("orders of operators in %s are not known yet: it does not answer", file.path)

    def take(self, directory: str) -> None:
        """A device can be used: take the orders that are in its directory."""
        file = self._directories.get(directory)
        if file is not None and not file.taken:
            self._take(file)

    def _take(self, file: _File) -> None:
        found = file.load()
        if found is None:
            return
        with self._lock:
            for tenant, digests in found.retired.items():
                for digest in digests:
                    self._retire(tenant, digest)
            file.evicted = found.evicted
            self._version = max(self._version, found.version)
            self._evicted = max(self._evicted, found.evicted)

    # -- retired weights

    def retire(self, tenant: str, weights_digest: str) -> None:
        """The weights with this digest have changed in place."""
        with self._lock:
            self._retire(tenant, _short(weights_digest))

    def _retire(self, tenant: str, digest: bytes) -> None:
        retired = self._retired.setdefault(tenant, OrderedDict())
        retired[digest] = None
        if len(retired) > self._most:
            retired.popitem(last=False)
            self._forgotten += 1
            log.warning(
                "the oldest retired weights of tenant '%s' are forgotten: the limit is %d digests", tenant, self._most
            )

    def is_retired(self, tenant: str, weights_digest: str) -> bool:
        """True if these weights have changed in place."""
        with self._lock:
            return _short(weights_digest) in self._retired.get(tenant, ())

    # -- evictions

    def evict(self, missed: Collection[str] = ()) -> None:
        """Segments were evicted, and the devices at the paths `missed` have not carried that out; nor have those that
        are not in the setting `disk` now."""
        with self._lock:
            followed = [file for path, file in self._directories.items() if path not in missed and self._clean(file)]
            self._evicted = max(time.time_ns(), self._evicted + 1)
            for file in followed:
                file.evicted = self._evicted
            evicted = self._evicted
        self.on_evicted(evicted)

    @property
    def evicted(self) -> int:
        """The last eviction, for `cleaned`."""
        with self._lock:
            return self._evicted

    def clean(self, path: str) -> bool:
        """False if the segments of the device at `path` are to be removed, because it missed an eviction."""
        with self._lock:
            return self._clean(self._directories[path])

    def _clean(self, file: _File) -> bool:
        return file.evicted >= self._evicted

    def cleaned(self, path: str, evicted: int) -> None:
        """The device at `path` has no segment of before the eviction `evicted`."""
        with self._lock:
            self._directories[path].evicted = evicted

    # -- files

    async def save(self) -> list[str]:
        """Write all files, each within `ANSWER_S`. Returns a text for each that could not be written."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._version += 1
            self._own.evicted = self._evicted
            retired = {tenant: list(each) for tenant, each in self._retired.items()}
            contents = [_Content(self._version, retired, file.evicted) for file in self._files]
        answers = [file.save(each, loop) for file, each in zip(self._files, contents, strict=True)]
        problems = []
        for file, answer in zip(self._files, answers, strict=True):
            try:
                problem = await asyncio.wait_for(asyncio.shield(answer), ANSWER_S)
            except TimeoutError:
                problem = "it does not answer"
            if problem:
                problems.append(f"{file.path}: {problem}")
        return problems

    def gauges(self) -> list[Level]:
        """The gauges, for the metrics page."""
        with self._lock:
            waiting = [Level(WAITING, (path,), not self._clean(file)) for path, file in self._directories.items()]
            return [Level(FORGOTTEN, (), self._forgotten), *waiting]


class _File:
    """One file with the orders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = False
        """True once its content was read, or it does not exist."""
        self._lock = threading.Lock()
        """Held while the file is written."""
        self._written = 0
        """Version of the content."""
        self.evicted = 0
        """See `_Content`."""

    def load(self) -> _Content | None:
        """The newest whole copy; None where there is none, which is logged unless the file is new."""
        try:
            with self._opened() as descriptor:
                data = os.pread(descriptor, 2 * COPY_BYTES, 0)
                if len(data) < 2 * COPY_BYTES:
                    _write_all(descriptor, bytes(2 * COPY_BYTES - len(data)), len(data))
                    os.fsync(descriptor)
        except OSError as error:
            log.warning("orders of operators cannot be kept in %s: %s", self.path, error.strerror)
            return None
        self.taken = True
        copies = [data[:COPY_BYTES], data[COPY_BYTES:]]
        found = [each for each in map(_decoded, copies) if each is not None]
        if not found and any(any(each) for each in copies):
            log.error("%s is damaged: the orders of operators in it are lost", self.path)
        return max(found, key=lambda each: each.version, default=None)

    def save(self, content: _Content, loop: asyncio.AbstractEventLoop) -> asyncio.Future[str]:
        """Write the content in a thread. The result is a text about the failure, or an empty one."""
        result: asyncio.Future[str] = loop.create_future()
        data = msgspec.msgpack.encode(content)

        def settle(problem: str) -> None:
            if not result.done():
                result.set_result(problem)

        def run() -> None:
            problem = self._save(content.version, data)
            # A closed loop raises RuntimeError.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, problem)

        try:
            threading.Thread(target=run, name="orders", daemon=True).start()
        except RuntimeError as error:
            result.set_result(str(error))
        return result

    def _save(self, version: int, data: bytes) -> str:
        if len(data) > COPY_BYTES - _HEAD.size:
            return "the orders take too many bytes"
        # One thread of a device that hangs waits for it; the others say so.
        if not self._lock.acquire(timeout=ANSWER_S):
            return "it does not answer"
        try:
            if version < self._written:
                # A later order is there, and it has this one too.
                return ""
            copy = _HEAD.pack(_MAGIC, version, len(data), _digest(version, data)) + data
            with self._opened() as descriptor:
                for at in (0, COPY_BYTES):
                    _write_all(descriptor, copy, at)
                    os.fsync(descriptor)
            self._written = version
        except OSError as error:
            return error.strerror or str(error)
        finally:
            self._lock.release()
        return ""

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(errno.EINVAL, "it is a link to a file elsewhere, or no file")
            if found.st_uid not in (os.geteuid(), os.stat(self.path.parent).st_uid):
                raise OSError(errno.EPERM, "it belongs to another user")
            yield descriptor
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def _decoded(copy: bytes) -> _Content | None:
    if len(copy) < _HEAD.size:
        return None
    magic, version, length, digest = _HEAD.unpack_from(copy)
    data = copy[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(data) != length or digest != _digest(version, data):
        return None
    with contextlib.suppress(msgspec.MsgspecError):
        return _DECODER.decode(data)
    return None


def _digest(version: int, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, salt=version.to_bytes(8, "little")).digest()


def _short(weights_digest: str) -> bytes:
    return hashlib.blake2b(weights_digest.encode(), digest_size=16, person=b"weights digest").digest()
