"""The ports, sockets and directories that a daemon needs at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tokenlake.config import Address, ServerConfig, parse_address
from tokenlake_operator.doctor.base import Finding, refusal
from tokenlake_server.disk.store import RESERVE_BYTES
from tokenlake_server.engines.local_socket import ENGINES, check, is_shared
from tokenlake_server.peers.listeners import open_listener
from tokenlake_server.start.running import require_directory


def check_ports(config: ServerConfig) -> Iterator[Finding]:
    """Yield a finding for each port that another process has, and for each address that is none of this machine. To be
    called while the daemon does not run."""
    texts = {"listen": config.listen, "metrics": config.metrics, "control": config.control}
    wanted = [(setting, parse_address(text)) for setting, text in texts.items() if text]
    for setting, address in [*wanted, *(("bulk_listen", each) for each in config.bulk_listen)]:
        yield from refusal("address", partial(_listen, address, setting))


def _listen(address: Address, setting: str) -> None:
    open_listener(address, setting).close()


def check_sockets(config: ServerConfig) -> Iterator[Finding]:
    """Yield a finding for each socket that the daemon could not make, or that another daemon has. To be called while
    the daemon does not run."""
    shared = is_shared(config.socket)
    for setting in ("socket", "control_socket"):
        path = Path(os.path.abspath(getattr(config, setting)))
        if not getattr(config, setting):
            continue
        if setting == "control_socket" and shared and path.parent == Path(os.path.abspath(config.socket)).parent:
            continue  # the daemon takes another place for it
        found = list(refusal("socket", partial(check, path, setting)))
        yield from found
        if setting == ENGINES and shared and not found:
            problem = "other users can write its directory and take the socket away; engines check who listens"
            cure = f"give the directory to one user (`chmod go-w {path.parent}`), unless all its users are of one pod"
            yield Finding("warning", "socket-shared", f"socket = {path}", problem, cure)


def check_directories(config: ServerConfig) -> Iterator[Finding]:
    """Yield findings about the directories of the orders and of the disk tier."""
    if config.state_directory:
        yield from refusal("state-directory", partial(require_directory, "state_directory", config.state_directory))
    for disk in config.disk:
        found = list(refusal("disk", partial(require_directory, "disk", disk.path)))
        yield from found
        if found or disk.nbytes is None:
            continue
        status = os.statvfs(disk.path)
        used = sum(each.stat().st_blocks * 512 for each in Path(disk.path).glob("slab-*"))
        room = used + status.f_bavail * status.f_frsize - RESERVE_BYTES
        if room < disk.nbytes:
            problem = f"the tier will take {max(0, room) >> 20} MiB, because no more is free there"
            yield Finding(
                "warning", "disk-size", f"disk = {disk}", problem, "give a lower size, or use a larger device"
            )
