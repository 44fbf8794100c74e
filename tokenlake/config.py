"""The settings of a daemon: one flat table, four sources.

A flag wins over the environment (`TOKENLAKE_MEMORY`), that over the TOML file, that over the default. Every
source is checked, also where another overrides it: a wrong file stays wrong. Every variable that starts with
`TOKENLAKE_` is a setting, so a misspelt one is refused. Nothing here reads a file or the process's
environment: both are passed in.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tokenlake import config_values as kinds
from tokenlake.config_values import Address, Kind, Peer, Secret, Tenant, format_size, parse_address, parse_size
from tokenlake.errors import ConfigurationError
from tokenlake.local_socket import DEFAULT_NODE, SYSTEM_DIRECTORY, default_socket
from tokenlake.store.eviction import POLICIES

__all__ = [
    "DEFAULT",
    "ENGINE_PREFIX",
    "Address",
    "Peer",
    "Secret",
    "ServerConfig",
    "Settings",
    "Tenant",
    "format_size",
    "load_config",
    "parse_address",
    "parse_size",
]

PREFIX = "TOKENLAKE_"
ENGINE_PREFIX = "TOKENLAKE_ENGINE_"
"""Settings of the engines of this node, which may be started from the same shell."""
DEFAULT = "default"
"""`Settings.origin` of a value that no source gave."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon is told. Sizes are bytes, names end in their unit, shares are of `memory`.

    Made by `load_config`, which checks it; the comments give the reason of each default.
    """

    # A single node needs no name of its own; a second one on the same ring is refused until it has one.
    node: str = DEFAULT_NODE
    # Enough for a few thousand tokens of an 8B model; pre-touched in about two seconds.
    memory: int = 1 << 30
    # Of root; of others by `load_config` (`tokenlake.local_socket`). The runtime directory of the system or of the
    # user, where no other user can put a socket, and a name that two nodes do not share.
    socket: str = f"{SYSTEM_DIRECTORY}/tokenlake-{DEFAULT_NODE}.sock"
    # Peers' connections are authenticated but not encrypted yet, hence loopback; port 0 takes a free one.
    listen: str = "127.0.0.1:7440"
    # Nobody else: a pool of one node. Never holds this node itself, whose weight is `memory` where the peers
    # have sizes, and that of each of them where they have none.
    peers: tuple[Peer, ...] = ()
    # Metrics and health, readable by every user of this machine; "" turns them off.
    metrics: str = "127.0.0.1:7441"
    # A region has one tenant: large enough for tens of segments of 1 MiB, small enough for 16 in 1 GiB.
    # Where `memory` is smaller, the default is `memory`.
    region_size: int = 64 << 20
    # Several heartbeats, so that a lost one does no harm; a dead engine's lease ends soon all the same.
    lease_s: float = 10.0
    # A reservation lasts from prepare to commit: the longest prefill we expect between them.
    reservation_s: float = 30.0
    # Less than the recompute of one segment; a longer wait would cost more than the hit saves.
    match_deadline_ms: float = 20.0
    # Ten times a slow round trip under load; the calls in flight wait this long once.
    suspect_ms: float = 250.0
    # What fetched and already pushed copies may hold, so that they never crowd out home copies: each of them has its
    # home copy elsewhere, and is one segment less that is found.
    staged_share: float = 0.03
    # What writes may pile up while the network is slower than the engines; beyond it a store is refused.
    dirty_share: float = 0.10
    # Some tens of segments are hot at a time: of a node's thousands this holds all of them.
    replica_share: float = 0.05
    # What is left: another session can always read something. Half of it serves fetches.
    session_lease_share: float = 0.75
    # Reserved slots hold nothing readable yet, hence half of what may be leased.
    session_reserve_share: float = 0.25
    # 8 engines of 8 ranks with room for as many processes that restart; bounds file descriptors and maps.
    max_sessions: int = 256
    # The frame of a match over 128K tokens is below 100 KiB; payload never travels in a frame.
    max_frame: int = 4 << 20
    # Consecutive segments kept on one node. 0 chooses: 1 below 16 nodes, 4 from 16, where a prefix would
    # otherwise touch too many nodes.
    run_length: int = 0
    # They must be set aside by the administrator first.
    huge_pages: bool = False
    # "": memfd, which has no name to clean up and no limit by a container's /dev/shm.
    arena_directory: str = ""
    # Empty: the daemon's own user only.
    allow_uids: tuple[int, ...] = ()
    # Empty: one tenant "default" of all allowed users, its secret the same on every node.
    tenants: tuple[Tenant, ...] = ()
    # Empty: a constant that everybody knows, as where one tenant's nodes are alone on a machine. Never a flag,
    # which other users could read in the list of processes.
    cluster_secret: Secret = Secret()
    # It needs torch, and memory bandwidth that the engines of this node may want for themselves.
    query_engine: bool = False
    # The event log grows without bound; it is for finding faults.
    record: str = ""
    # A daemon that serves users must not end by itself.
    failpoint: str = ""
    # On eight nodes it keeps at least what the others keep, in each trace that we tried.
    eviction: str = "reuse"
    # "": nothing outlives the process. What is learned again within minutes is not worth guessing a directory for that
    # is writable, survives a restart and belongs to this node alone.
    state_directory: str = ""
    # As much as reads get: less would keep writes from other nodes waiting until they are refused.
    background_share: float = 0.5
    # Without copies one template that all requests share makes its node the bottleneck.
    hot: str = "on"
    # Real workloads pass as fast as the clock.
    time_scale: float = 1.0
    # A line per request would cost more than many a request does.
    log_level: str = "info"


_SECRETIVE = ("tenant", "secret", "token", "credential")

# Linux allows 107 bytes in the address of a Unix socket.
_SOCKET = kinds.path("a path of 1 to 107 bytes", longest=107)
_SHARE = kinds.real(0.01, 1, "a share of memory")

_KINDS: dict[str, Kind] = {
    "node": kinds.name(),
    "memory": kinds.size(64 << 10, 1 << 50, multiple=kinds.PAGE),
    "socket": _SOCKET,
    "listen": kinds.loopback(),
    "peers": kinds.peers(),
    "metrics": kinds.loopback(optional=True),
    "region_size": kinds.size(64 << 10, 1 << 50, multiple=kinds.PAGE),
    "lease_s": kinds.real(0.1, 3600, "seconds"),
    "reservation_s": kinds.real(0.1, 3600, "seconds"),
    "match_deadline_ms": kinds.real(1, 60_000, "milliseconds"),
    "suspect_ms": kinds.real(1, 60_000, "milliseconds"),
    "staged_share": _SHARE,
    "dirty_share": _SHARE,
    "replica_share": _SHARE,
    "session_lease_share": _SHARE,
    "session_reserve_share": _SHARE,
    "max_sessions": kinds.whole(1, 65536),
    "max_frame": kinds.size(64 << 10, 1 << 30),
    "run_length": kinds.whole(0, 1024),
    "huge_pages": kinds.truth(),
    "arena_directory": kinds.path("an absolute path, or nothing for memfd", absolute=True, optional=True),
    "allow_uids": kinds.uids(),
    "tenants": kinds.tenants(),
    "cluster_secret": kinds.secret(),
    "query_engine": kinds.truth(),
    "record": kinds.path("a path, or nothing", optional=True),
    "failpoint": kinds.failpoint(),
    "eviction": kinds.one_of(*POLICIES),
    "state_directory": kinds.path("an absolute path, or nothing", absolute=True, optional=True),
    "background_share": kinds.real(0.01, 0.99, "a share of what comes in from other nodes"),
    "hot": kinds.one_of("on", "observe", "off"),
    "time_scale": kinds.real(0.001, 1e6, "seconds of the workload in each second"),
    "log_level": kinds.one_of("debug", "info", "warning", "error"),
}


class Settings(msgspec.Struct, frozen=True):
    """A checked configuration, and for each field where its value came from: `default`, `file`,
    `environment TOKENLAKE_X` or `flag --x`."""

    config: ServerConfig
    origin: Mapping[str, str]

    def describe(self) -> Iterator[tuple[str, str, str]]:
        """(field, value, origin) of each setting, in the order of `ServerConfig`; secrets are masked."""
        for field, kind in _KINDS.items():
            yield field, kind.show(getattr(self.config, field)), self.origin[field]


def load_config(
    *, toml_text: str | None, environ: Mapping[str, str], flags: Mapping[str, object], uid: int
) -> Settings:
    """Merge and check the sources.

    `toml_text` None: no file. `flags` has the names of the fields; one that is None was not given. `environ`
    may hold variables of others. `uid`: the user that the daemon runs as.

    Raises ConfigurationError for the first setting that is unknown or invalid.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(_KINDS, DEFAULT)
    for field, raw, source in _given(toml_text, environ, flags):
        if field not in _KINDS:
            raise _error(field, raw, _closest(field), source)
        try:
            values[field] = _KINDS[field].parse(raw)
        except ValueError as error:
            raise _error(field, raw, str(error), source) from None
        origin[field] = source
    _fill_computed_defaults(values, environ, uid)
    config = ServerConfig(**values)
    _check_together(config, origin)
    config = _without_self(config, origin)
    if config.peers and config.tenants and not config.cluster_secret:
        expected = (
            "16 to 64 bytes in hexadecimal, the same on all nodes, because there are 'peers' and 'tenants': without it "
            "any process of this machine could pose as a node and obtain a tenant's cache; set it in the "
            f"configuration file or as {PREFIX}CLUSTER_SECRET"
        )
        raise ConfigurationError("cluster_secret", "", expected)
    return Settings(config, origin)


def _given(
    toml_text: str | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Iterator[tuple[str, object, str]]:
    """(field, raw value, origin) of everything that was set, the weakest source first."""
    for field, raw in _table(toml_text).items():
        yield field, raw, "file"
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and not variable.startswith(ENGINE_PREFIX):
            yield variable.removeprefix(PREFIX).lower(), environ[variable], f"environment {variable}"
    for field, flag in flags.items():
        if flag is not None:
            yield field, flag, f"flag --{field.replace('_', '-')}"


def _table(toml_text: str | None) -> dict[str, object]:
    try:
        return tomllib.loads(toml_text or "")
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError("configuration file", str(error), "valid TOML") from None


def _fill_computed_defaults(values: dict[str, Any], environ: Mapping[str, str], uid: int) -> None:
    plain = ServerConfig()
    if "socket" not in values:
        socket = default_socket(environ, values.get("node", plain.node), uid)
        try:
            values["socket"] = _SOCKET.parse(socket)
        except ValueError as error:
            raise _error("socket", socket, str(error), DEFAULT) from None
    if "region_size" not in values:
        values["region_size"] = min(plain.region_size, values.get("memory", plain.memory))


def _check_together(config: ServerConfig, origin: Mapping[str, str]) -> None:
    """What concerns two fields; the error names the one to change."""

    def refuse(field: str, expected: str) -> ConfigurationError:
        shown = _KINDS[field].show(getattr(config, field))
        return _error(field, shown, expected, origin[field])

    if config.region_size > config.memory:
        raise refuse("region_size", f"at most memory, {format_size(config.memory)}")
    if config.huge_pages and config.region_size % kinds.HUGE_PAGE:
        raise refuse("region_size", f"a multiple of {format_size(kinds.HUGE_PAGE)} with huge_pages")
    if config.staged_share + config.dirty_share + config.replica_share > 0.95 + 1e-9:
        raise refuse("staged_share", "at most 0.95 with dirty_share and replica_share: the rest is for home copies")
    if config.metrics == config.listen and parse_address(config.listen).port:
        raise refuse("metrics", f"another address than listen, {config.listen}")


def _without_self(config: ServerConfig, origin: Mapping[str, str]) -> ServerConfig:
    """All nodes may share one list of peers: the entry of this node must agree with it, and is left out."""
    own = parse_address(config.listen)
    for peer in config.peers:
        expected = f"{config.node}={own}, as listen says, for the entry of this node"
        if peer.name == config.node and (peer.host, peer.port) != own:
            raise _error("peers", str(peer), expected, origin["peers"])
        if peer.name == config.node and peer.memory not in (None, config.memory):
            expected = f"/{format_size(config.memory)}, as memory says, for the entry of this node"
            raise _error("peers", str(peer), expected, origin["peers"])
        if peer.name != config.node and (peer.host, peer.port) == own:
            raise _error("peers", str(peer), f"{own} to be this node, {config.node}", origin["peers"])
    others = tuple(peer for peer in config.peers if peer.name != config.node)
    return msgspec.structs.replace(config, peers=others)


def _closest(field: str) -> str:
    near = difflib.get_close_matches(field, _KINDS, n=1)
    return f"a known setting (did you mean {near[0]!r}?)" if near else f"one of {', '.join(_KINDS)}"


def _error(field: str, value: object, expected: str, source: str) -> ConfigurationError:
    # Tables hold tenants, and a misspelt name may hide a secret: neither is shown.
    tables = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(i, dict) for i in value))
    if tables or any(word in field for word in _SECRETIVE):
        value = kinds.MASK
    return ConfigurationError(field, value, f"{expected} (set by {source})")
