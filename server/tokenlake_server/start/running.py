"""Runs one daemon from its start to the signal that ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from tokenlake.config import DEFAULT, ServerConfig
from tokenlake.errors import ConfigurationError, LimitReached, TokenLakeError
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.local_socket import ENGINES, control_of_this_user, is_shared, prepare
from tokenlake_server.kept.memory import open_kept
from tokenlake_server.loop import garbage_collector
from tokenlake_server.loop.started_threads import started_threads
from tokenlake_server.start import allocator
from tokenlake_server.start.available_memory import require_memory
from tokenlake_server.start.daemon import Daemon
from tokenlake_server.start.service_manager import ServiceManager

log = logging.getLogger(__name__)

LATE_S = 20.0
"""Seconds for which a node that drains because of SIGTERM waits beyond `drain_s` for etcd."""
OWN_DESCRIPTORS, REGION_DESCRIPTORS = 256, 2
"""Numbers of descriptors that the daemon needs for itself, and for each region: the file and its mapping."""
SWITCH_S = 0.0005
"""For `sys.setswitchinterval`: seconds for which a thread may keep the interpreter lock while the control loop waits
for it. With Python's default, 5 ms, the loop would wait that long behind each of its system calls while a plan is
calculated."""
WORK_THREADS = 4
"""Number of threads for work that would block the control loop: memory of regions, files, starts and ends of
processes."""


IGNORED = (
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGPWR,
)
"""Signals that mean nothing to a daemon, and that end a process that does not handle them."""


def require_directory(setting: str, path: str) -> None:
    """Raise `ConfigurationError` unless `path` is a directory in which this process may create files."""
    if not os.path.isdir(path):
        raise ConfigurationError(
            setting,
            path,
            "a directory that exists; make it with `install -d -o USER`, mount the device, or leave the setting out",
        )
    try:
        # `os.access` would let root pass for a directory such as /proc.
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError:
        raise ConfigurationError(setting, path, f"a directory that uid {os.getuid()} may write to (`chown`)") from None


def _ignore(number: signal.Signals) -> None:
    log.warning("%s has no effect: settings are read at the start, and SIGTERM ends this node", number.name)


def _raise_descriptor_limit(config: ServerConfig) -> None:
    """Raise the soft limit of open descriptors. Each process of an engine takes two, and the usual limit of 1024 is too
    low for the default of `max_sessions`. Raises `LimitReached` where the hard limit leaves none beside the regions."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_DESCRIPTORS + REGION_DESCRIPTORS * config.regions
    if hard < needed:
        raise LimitReached(
            f"{config.regions} regions ('memory' in parts of 'region_size') take {needed} descriptors, and the hard "
            f"limit is {hard}: set LimitNOFILE={needed} in the unit of systemd, run `ulimit -Hn {needed}`, or give a "
            "larger 'region_size'"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _out_of_a_shared_directory(config: ServerConfig, origin: Mapping[str, str]) -> ServerConfig:
    """Where others can write the directory of the engines' socket, its clients check the process that listens; those of
    the control socket connect by its path. So its default is then the directory of this user; or it is turned off."""
    if not is_shared(config.socket):
        return config
    log.warning(
        "other users can write the directory of %s and take the socket away: engines check the process that listens",
        config.socket,
    )
    if not config.control_socket or origin.get("control_socket", DEFAULT) != DEFAULT:
        return config
    own = control_of_this_user(config.node)
    try:
        prepare(Path(own), "control_socket")
    except ConfigurationError as error:
        log.warning("this node has no control plane: %s; set 'control_socket'", error)
        own = ""
    else:
        log.warning("the control socket is %s", own)
    return msgspec.structs.replace(config, control_socket=own)


def _drain_or_stop(daemon: Daemon, stop: asyncio.Event) -> None:
    """Handle SIGTERM where `drain_s` is set: the first one drains the node, another one ends the daemon at once."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if not daemon.membership.state.known:
        stop.set()
        return

    async def drain() -> None:
        try:
            await daemon.ring.drain()
            await asyncio.sleep(daemon.ring.drain_s + LATE_S)
            log.error("this node ends, although it has not left the ring: etcd does not answer any more")
        except TokenLakeError as error:
            log.error("this node ends without a drain, and stays a member: %s", error)
        stop.set()

    daemon.ring.begin(drain())


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()


async def run(
    config: ServerConfig,
    serving: Callable[[Daemon], None],
    report: Callable[[int, int], None] = lambda done, total: None,
    ready: Callable[[Daemon], None] = lambda daemon: None,
    *,
    origin: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a daemon until SIGTERM or SIGINT.

    `serving(daemon)` is called when the daemon serves, before its first event, `report(bytes, bytes in total)` while it
    prepares its memory, and `ready(daemon)` when all of it is there. `origin`: the source of
    each setting.

    Raises `ConfigurationError` or `LimitReached` when the daemon cannot start.
    """
    if config.state_directory:
        require_directory("state_directory", config.state_directory)
    # First of all, so that a second start of a daemon that runs reports this, and not the port that is taken.
    prepare(Path(config.socket), ENGINES)
    config = _out_of_a_shared_directory(config, origin)
    _raise_descriptor_limit(config)
    arena = Arena(config.huge_pages)
    kept = open_kept(config, arena, os.environ)
    there = kept.nbytes if kept is not None else 0
    require_memory(config.memory - there, config.regions if config.huge_pages else 0)
    loop = asyncio.get_running_loop()
    allocator.set_up()
    sys.setswitchinterval(SWITCH_S)
    loop.set_default_executor(started_threads(WORK_THREADS, "work"))
    manager = ServiceManager(os.environ)
    stop = asyncio.Event()
    for ignored in IGNORED:
        loop.add_signal_handler(ignored, _ignore, ignored)
    # A terminal that is closed sends SIGHUP to what runs in it.
    ending = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if sys.stderr.isatty() else ()))
    for number in ending:
        loop.add_signal_handler(number, stop.set)
    try:
        daemon = Daemon(config, arena, origin, report, kept)
        garbage_collector.set_up(daemon.watchdog.collected)
        if config.drain_s:
            loop.add_signal_handler(signal.SIGTERM, _drain_or_stop, daemon, stop)
        serving(daemon)
        # Here, and not when the memory is prepared: engines can connect, and the time of the rest grows with `memory`.
        manager.tell("READY=1", f"STATUS=serves at {config.socket}; memory is being prepared")
        manager.keep_alive(loop)
        await _first(stop, daemon.ring.left, daemon.regions.prepared)
        if daemon.regions.prepared.is_set():
            ready(daemon)
            manager.tell(f"STATUS=serves at {config.socket}")
        await _first(stop, daemon.ring.left)
        log.info("stopping")
        manager.tell("STOPPING=1", "STATUS=stopping")
        daemon.watchdog.stop()
        await daemon.close()
        for number in (*ending, *IGNORED):
            # From here on signals are ignored: one that arrived while the interpreter exits would end the process by
            # the signal and not with status 0.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    finally:
        try:
            arena.close()
        except BufferError:
            log.warning("the memory is unmapped by the end of the process: a thread that hangs still uses it")
