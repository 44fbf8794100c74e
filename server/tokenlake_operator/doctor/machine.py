"""The kernel, the memory and the limits of this machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from tokenlake.config import ServerConfig, format_size
from tokenlake_operator.doctor.base import Finding, refusal
from tokenlake_operator.words import amount
from tokenlake_server.engines.arena import MADV_POPULATE_WRITE
from tokenlake_server.engines.connected_process import kernel_has_pidfds
from tokenlake_server.kept.keeper_process import held_bytes
from tokenlake_server.kept.memory import keeper_path
from tokenlake_server.start.available_memory import require_memory
from tokenlake_server.start.cgroups import PROC, rooms
from tokenlake_server.start.running import OWN_DESCRIPTORS, REGION_DESCRIPTORS

PER_PROCESS = 2
"""Number of descriptors that the daemon needs for each process of an engine."""
RANKS = 8
"""Number of processes of one engine for which the check of open files makes room."""
THREADS = 128
"""Maximum number of processes and threads of a daemon, without its query engine."""


class Machine:
    """The facts of this machine that the checks need. Tests replace some of them."""

    def __init__(self, pid: int | None = None, proc: Path = PROC) -> None:
        """`pid`: the daemon, once it runs; its limits count then, and not those of this process."""
        self._pid = pid
        self.proc = proc

    def limit(self, kind: int) -> int | None:
        """The hard limit `resource.RLIMIT_...`; None: there is none, or it cannot be read."""
        try:
            hard = resource.prlimit(self._pid or 0, kind)[1]
        except (OSError, ValueError):
            return None
        return None if hard == resource.RLIM_INFINITY else hard

    def threads_left(self) -> tuple[int, str] | None:
        """Processes and threads that the cgroups of the daemon may still start, and the source of that limit; None: any
        number."""
        limits = rooms("pids", {"pids.max": "pids.current"}, self.proc, self._pid or "self")
        return min(((room.amount, room.source) for room in limits), default=None)

    def has_sealed_memory(self) -> bool:
        """True if the kernel has sealed anonymous files (memfd)."""
        try:
            os.close(os.memfd_create("tokenlake-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except (OSError, AttributeError):
            return False
        return True

    def has_populate(self) -> bool:
        """True if madvise allocates pages at once."""
        with mmap.mmap(-1, mmap.PAGESIZE) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            done: int = ctypes.CDLL(None).madvise(address, ctypes.c_size_t(mmap.PAGESIZE), MADV_POPULATE_WRITE)
            del anchor
        return done == 0

    def has_pidfds(self) -> bool:
        """True if the kernel shows the end of every engine, in any PID namespace."""
        return kernel_has_pidfds()


def check_machine(config: ServerConfig, machine: Machine, *, running: bool) -> Iterator[Finding]:
    """Yield findings about the kernel, the limits and the memory of the machine. `running`: True if the daemon runs and
    has its memory already."""
    yield from _kernel(machine)
    yield from _limits(config, machine)
    if not running:
        regions = config.regions if config.huge_pages else 0
        check = "huge-pages" if regions else "memory"
        # The memory of the daemon before, which a keeper has, is there already.
        nbytes = max(0, config.memory - (held_bytes(keeper_path(config.socket)) if config.keep_s else 0))
        yield from refusal(check, lambda: require_memory(nbytes, regions, machine.proc))


def _kernel(machine: Machine) -> Iterator[Finding]:
    release = os.uname().release
    if not machine.has_sealed_memory():
        yield Finding(
            "error",
            "kernel-memfd",
            f"kernel {release}",
            "it has no memfd with seals, in which the cache lies",
            "run Linux 3.17 or later, and allow memfd_create in the seccomp profile of the container",
        )
    if not machine.has_populate():
        yield Finding(
            "warning",
            "kernel-populate",
            f"kernel {release}",
            "it has no MADV_POPULATE_WRITE: pages are allocated when they are first written, so that first writes are "
            "slow, and a lack of memory ends the daemon later and not at its start",
            "run Linux 5.14 or later",
        )
    if not machine.has_pidfds():
        yield Finding(
            "warning",
            "kernel-pidfd",
            f"kernel {release}",
            "it has no SO_PEERPIDFD: the end of an engine in a container is noticed by a file lock, up to 1 s late",
            "run Linux 6.5 or later",
        )


def _limits(config: ServerConfig, machine: Machine) -> Iterator[Finding]:
    files = machine.limit(resource.RLIMIT_NOFILE)
    least = OWN_DESCRIPTORS + REGION_DESCRIPTORS * config.regions
    needed = least + PER_PROCESS * RANKS * config.max_sessions
    if files is not None and files < needed:
        yield Finding(
            "error" if files < least else "warning",
            "limit-files",
            "RLIMIT_NOFILE",
            f"the hard limit is {files} open files; {config.regions} regions of memory and {config.max_sessions} "
            f"engines (max_sessions) of {RANKS} ranks need {needed}",
            f"set LimitNOFILE={needed} in the unit of systemd, run `ulimit -Hn {needed}`, or lower 'max_sessions'",
        )
    for name, kind in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_FSIZE", resource.RLIMIT_FSIZE)):
        limit = machine.limit(kind)
        size = config.memory if kind == resource.RLIMIT_AS else config.region_size
        if limit is not None and limit < size + (1 << 30 if kind == resource.RLIMIT_AS else 0):
            yield Finding(
                "error",
                "limit-memory",
                name,
                f"the hard limit is {amount(limit)}; 'memory' = {format_size(config.memory)} needs more",
                f"set {'LimitAS' if kind == resource.RLIMIT_AS else 'LimitFSIZE'}=infinity in the unit",
            )
    left = machine.threads_left()
    if left is not None and left[0] < THREADS:
        yield Finding(
            "error",
            "limit-threads",
            left[1],
            f"{max(0, left[0])} more threads may start; a daemon needs up to {THREADS}",
            "raise pids.max (TasksMax in the unit, pids_limit of the container)",
        )
