"""Orders of operators that outlive the daemon: weights that were retired, and segments that are still to be removed
from devices that could not be written.

The orders are kept in a file of the state directory (else beside the local socket) and in each directory of the disk
tier. A file has two equal copies::

    | magic, version, bytes, digest | orders, msgpack | ... 512 KiB | the same again |

Its space is allocated when the daemon starts, so that a later order needs none. The copies are written and synced one
after the other: a process that is killed, or a damaged sector, leaves one of them. The newest copy of all files counts
for segments to be removed, with those of this daemon, and all of them together for retired weights.

A directory that is not in the setting `disk` any more may come back, at its path or at another one. So removals wait
for it too, and a directory that was not used under its path before gets those of all directories.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tokenlake.errors import LimitReached
from tokenlake.keys import KEY_BYTES
from tokenlake.metrics import Level, Metric

log = logging.getLogger(__name__)

FILE = "orders"
"""Name of the file in a directory of the disk tier."""
MAX_RETIRED = 1024
"""Limit of the digests of changed weights that are remembered for each tenant; the oldest is forgotten."""
MAX_ALL_RETIRED = 8192
"""The same for all tenants together, each of which has an equal part."""
MAX_SIZES = 1024
"""Limit of the sizes of segments that are remembered with the digests of their weights, for all tenants together."""
MAX_DROPS = 64
"""Limit of the removals that wait for one device; beyond it, all segments there are removed."""
MAX_DROPPED_KEYS = 256
"""Limit of the keys of one removal; beyond it, all segments of the tenant are removed."""
MAX_KEY_BYTES = 128 << 10
"""Limit of the bytes of keys of all removals that wait; beyond it, all segments of the tenant are removed."""
MAX_ABSENT = 8
"""Limit of the directories that were used earlier, are not in the setting `disk`, and are remembered."""
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
    "Removals of segments that wait until the device, one of the setting `disk`, can be written",
    "path",
    kind="gauge",
)


class Drop(msgspec.Struct, frozen=True, array_like=True):
    """Segments that are to be removed from a device: those of `keys`, if there are any, else all of the tenant (of one
    size, unless it is 0); those of all tenants for an empty name."""

    tenant: str
    slot_bytes: int = 0
    keys: bytes = b""

    def covers(self, tenant: str, slot_bytes: int) -> bool:
        """True if segments of this tenant and size are to be removed, all or some."""
        return self.tenant in ("", tenant) and self.slot_bytes in (0, slot_bytes)


class _Content(msgspec.Struct, array_like=True):
    """The content of a file."""

    version: int = 0
    retired: dict[str, list[bytes]] = {}
    """By tenant, digests of the digests of weights, the oldest first."""
    sizes: dict[str, list[tuple[bytes, int]]] = {}
    """By tenant: (digest of the digest of the weights, bytes of a segment)."""
    drops: dict[str, list[Drop]] = {}
    """By path of the device."""
    directories: list[str] = []
    """Paths of the devices that were used, the oldest first."""


_DECODER = msgspec.msgpack.Decoder(_Content)
"""Made once: msgspec ends the process where two threads are the first to use a type at the same time."""


class StandingOrders:
    """The orders of one daemon. Its methods may be called from any thread and do not block, but for `load` and `take`;
    `save` is called on the loop."""

    def __init__(self, home: Path, directories: Sequence[str] = (), tenants: int = 1) -> None:
        """`home`: the file that is always written; `directories`: those of the disk tier; `tenants`: their number."""
        self._files = [_File(home), *(_File(Path(each, FILE)) for each in directories)]
        self._directories = frozenset(directories)
        self._most = max(1, min(MAX_RETIRED, MAX_ALL_RETIRED // tenants))
        self._most_sizes = max(1, MAX_SIZES // tenants)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._version = 0
        self._retired: dict[str, OrderedDict[bytes, None]] = {}
        self._sizes: dict[str, OrderedDict[tuple[bytes, int], None]] = {}
        self._drops: dict[str, list[Drop]] = {}
        self._fresh: list[tuple[str, Drop]] = []
        """Removals that were ordered since the start and wait: no file that is read later has them."""
        self._used: OrderedDict[str, None] = OrderedDict()
        """Paths of the devices that were used."""
        self._forgotten = 0

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
        for file in self._files[1:]:
            if file.path.parent == Path(directory) and not file.taken:
                self._take(file)

    def _take(self, file: _File) -> None:
        found = file.load()
        if found is None:
            return
        with self._lock:
            for tenant, digests in found.retired.items():
                for digest in digests:
                    self._retire(tenant, digest)
            for tenant, sizes in found.sizes.items():
                for size in sizes:
                    self._add_size(tenant, size)
            for path in found.directories:
                self._use(path)
            if found.version > self._version:
                self._version = found.version
                self._drops = {path: list(drops) for path, drops in found.drops.items()}
                fresh, self._fresh = self._fresh, []
                for path, drop in fresh:
                    self._drop(path, drop)

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

    def stores(self, tenant: str, weights_digest: str, slot_bytes: int) -> bool:
        """An engine with these weights stores segments of a size. Returns True if that was not known."""
        size = _short(weights_digest), slot_bytes
        with self._lock:
            known = size in self._sizes.get(tenant, ())
            self._add_size(tenant, size)
        return not known

    def _add_size(self, tenant: str, size: tuple[bytes, int]) -> None:
        sizes = self._sizes.setdefault(tenant, OrderedDict())
        sizes[size] = None
        if len(sizes) > self._most_sizes:
            sizes.popitem(last=False)

    def sizes(self, tenant: str, weights_digest: str) -> list[int]:
        """The sizes of the segments that engines with these weights have stored, as far as they are remembered."""
        digest = _short(weights_digest)
        with self._lock:
            return [slot_bytes for each, slot_bytes in self._sizes.get(tenant, ()) if each == digest]

    # -- removals

    def drop(self, path: str, drop: Drop) -> None:
        """Segments are to be removed from the device at `path` once it can be written."""
        with self._lock:
            self._drop(path, drop)

    def drop_absent(self, drop: Drop) -> None:
        """Segments are to be removed from the devices that were used earlier and are not configured now."""
        with self._lock:
            for path in self._absent():
                self._drop(path, drop)

    def _drop(self, path: str, drop: Drop) -> None:
        keys = sum(len(each.keys) for drops in self._drops.values() for each in drops) + len(drop.keys)
        if len(drop.keys) > MAX_DROPPED_KEYS * KEY_BYTES or (drop.keys and keys > MAX_KEY_BYTES):
            drop = Drop(drop.tenant)
        waiting = self._drops.setdefault(path, [])
        if drop not in waiting:
            waiting.append(drop)
        if len(waiting) > MAX_DROPS:
            log.warning("%s: more than %d removals wait, so that all segments are removed", path, MAX_DROPS)
            waiting[:] = [Drop("")]
        self._fresh = [each for each in self._fresh if each[0] != path or each[1] in waiting]
        if (path, waiting[-1]) not in self._fresh:
            self._fresh.append((path, waiting[-1]))

    def drops(self, path: str) -> list[Drop]:
        """The removals that wait for the device at `path`; those of all devices where it was not used there before."""
        with self._lock:
            if path in self._used:
                return list(self._drops.get(path, ()))
            return list(dict.fromkeys(each for drops in self._drops.values() for each in drops))

    def use(self, path: str) -> bool:
        """The device at `path` is used from now on, and `drops` were carried out there. Returns True if that is new."""
        with self._lock:
            return self._use(path)

    def _use(self, path: str) -> bool:
        if path in self._used:
            return False
        self._used[path] = None
        absent = self._absent()
        if len(absent) > MAX_ABSENT:
            log.warning("%s is forgotten: more than %d earlier directories of the disk tier", absent[0], MAX_ABSENT)
            del self._used[absent[0]]
            self._drops.pop(absent[0], None)
        return True

    def _absent(self) -> list[str]:
        return [path for path in self._used if path not in self._directories]

    @property
    def waiting(self) -> bool:
        """True while removals wait for a device."""
        with self._lock:
            return bool(self._drops)

    def dropped(self, path: str, drops: Sequence[Drop]) -> None:
        """These removals were carried out."""
        with self._lock:
            self._fresh = [each for each in self._fresh if each[0] != path or each[1] not in drops]
            left = [each for each in self._drops.get(path, ()) if each not in drops]
            if left:
                self._drops[path] = left
            else:
                self._drops.pop(path, None)

    # -- files

    async def save(self) -> list[str]:
        """Write all files, each within `ANSWER_S`. Returns a text for each that could not be written."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._version += 1
            content = _Content(
                self._version,
                {tenant: list(each) for tenant, each in self._retired.items()},
                {tenant: list(each) for tenant, each in self._sizes.items()},
                {path: list(each) for path, each in self._drops.items()},
                list(self._used),
            )
        data = msgspec.msgpack.encode(content)
        answers = [file.save(content.version, data, loop) for file in self._files]
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
            configured = ((path, drops) for path, drops in self._drops.items() if path in self._directories)
            waiting = [Level(WAITING, (path,), len(drops)) for path, drops in configured]
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

    def save(self, version: int, data: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[str]:
        """Write the content in a thread. The result is a text about the failure, or an empty one."""
        result: asyncio.Future[str] = loop.create_future()

        def settle(problem: str) -> None:
            if not result.done():
                result.set_result(problem)

        def run() -> None:
            problem = self._save(version, data)
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
