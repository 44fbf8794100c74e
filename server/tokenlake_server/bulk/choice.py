"""The transports of a daemon, and the choice between them for each request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenlake.config import ServerConfig
from tokenlake.errors import ConfigurationError, ProtocolRefused
from tokenlake.wire import peer
from tokenlake.wire.slots import SlotRef
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.bulk.transport import Transport
from tokenlake_server.engines.arena import Arena

if TYPE_CHECKING:
    from tokenlake_server.nixl.transport import Nixl

log = logging.getLogger(__name__)

MISSING = "NIXL is not installed: pip install --no-deps nixl-cu12, or another build of nixl"


class Transports:
    """The transports that this daemon has."""

    def __init__(self, tcp: Tcp, nixl: Nixl | None = None) -> None:
        self._tcp = tcp
        self.nixl = nixl

    def offer(self, node: str) -> tuple[str, int]:
        """The agent by which this node can read the memory of `node` now, and its version, for a `Pull`."""
        return self.nixl.offer(node) if self.nixl is not None else ("", 0)

    def of(self, answer: peer.Pulled) -> Transport:
        """The transport that the sender of the answer has chosen. Raises `ProtocolRefused` for one that this node did
        not offer."""
        if not answer.places:
            return self._tcp
        if self.nixl is None:
            raise ProtocolRefused("places of segments, and this node reads no memory of others")
        return self.nixl

    def to_answer(self, pull: peer.Pull, slots: Sequence[SlotRef]) -> Transport:
        """The transport by which the reader gets these slots."""
        return self.nixl if pull.agent and self.nixl is not None and self.nixl.lends(pull, slots) else self._tcp


def open_transports(config: ServerConfig, incarnation: int, arena: Arena) -> Transports:
    """The transports that the settings allow. Raises `ConfigurationError` where NIXL is required and not installed."""
    tcp = Tcp(arena)
    if config.transport == "tcp" or config.fabric != "trusted":
        return Transports(tcp)
    from tokenlake_server.nixl.agent import library  # only where asked for

    if library() is None:
        if config.transport == "nixl":
            raise ConfigurationError("transport", "nixl", f"tcp or auto, because {MISSING}")
        log.info("segments come over TCP: %s", MISSING)
        return Transports(tcp)
    networks = _networks()
    log.warning(
        "'fabric' is trusted: where NIXL can read (%s), the bytes of segments are not encrypted, and any process on "
        "that network that learns the keys of this node's memory can read all of it",
        ", ".join(networks),
    )
    from tokenlake_server.nixl.transport import Nixl

    return Transports(tcp, Nixl(config.node, incarnation, arena, networks))


def _networks() -> list[str]:
    """The networks by which the memory of this node can be read: RDMA, where a port is active, and the machine, for
    daemons of one machine."""
    networks = []
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    if any(_read(port).startswith("4:") for port in ports):
        networks.append("rdma")
    machine = _read(Path("/proc/sys/kernel/random/boot_id"))
    return [*networks, f"machine {machine}"] if machine else networks


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
