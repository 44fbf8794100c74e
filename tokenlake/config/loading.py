"""Loads the settings of a daemon from their sources and checks them together.

The order of precedence is flag, environment (`TOKENLAKE_MEMORY`), TOML file, default. Every source is checked, also
where another one overrides it. Every variable that starts with `TOKENLAKE_` is taken for a setting, so that a misspelt
one is refused, except for the settings of engines, routers and operators, and for those that Kubernetes sets for a
Service named `tokenlake`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tokenlake.config.kinds import HUGE_PAGE
from tokenlake.config.server import ServerConfig
from tokenlake.config.setting import DEFAULT, Given, PlainRefusal, describe, read, refusal, settings_of
from tokenlake.config.sources import is_service_link, of_environment, of_flags, of_toml
from tokenlake.config.values import (
    MAX_SOCKET_PATH,
    Address,
    format_size,
    is_loopback,
    is_own_address,
    parse_address,
)
from tokenlake.documentation import page
from tokenlake.errors import ConfigurationError
from tokenlake.wire.fields import MAX_ADDRESSES
from tokenlake.wire.local_socket import default_socket

PREFIX = "TOKENLAKE_"
USUAL_REGIONS, USUAL_REGION, MOST_REGIONS = 64, 1 << 30, 512
"""`region_size`: memory in 64 parts, so that pools get what they use; parts of 1 GiB from 64 GiB on, because a part is
prepared as a whole before it is used; 512 parts from 512 GiB on, because each takes two descriptors."""
ENGINE_PREFIX = "TOKENLAKE_ENGINE_"
"""Prefix of the engines' settings. A daemon ignores them: engines may be started from the same shell."""
OPERATOR_PREFIX = "TOKENLAKE_OPERATOR_"
"""Prefix of the defaults of an operator's commands, such as the certificate. A daemon ignores them."""
ROUTER_PREFIX = "TOKENLAKE_ROUTER_"
"""Prefix of the settings of routers' plug-ins, which a daemon ignores as well."""
ENGINE_SETTINGS = (
    *("call_ms", "credential", "daemon_uid", "fetch_ms", "match_ms", "salt", "save", "segment_tokens"),
    *("serve_inexact", "verify", "weigh_loads", "weights_digest", "write_patience_s", "write_queue"),
)
"""The settings of engines that a daemon does not have."""
OF_ENGINES = (
    "it is a setting of engines; give it in kv_connector_extra_config of vLLM or in EngineOptions of transformers "
    f"({page('vllm#settings')})"
)
LISTING = "`tokenlake config show` lists the settings"


class Settings(msgspec.Struct, frozen=True):
    """A checked configuration, and the origin of each field's value: `default`, the file and its line,
    `environment TOKENLAKE_X` or `flag --x`."""

    config: ServerConfig
    origin: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    """Names of variables that start like a setting but were set by Kubernetes for a Service, and so are not used."""

    def describe(self) -> Iterator[tuple[str, str, str]]:
        """(field, value, origin) of each setting; secrets are masked."""
        return describe(self.config, self.origin)


def load_config(
    *, toml_text: str | None, environ: Mapping[str, str], flags: Mapping[str, object], uid: int, file: str = "file"
) -> Settings:
    """Merge and check the sources.

    `toml_text`: None where there is no file; `file` is its name in errors. `flags`: by the name of the field; None for
    a flag that was not given. `environ` may hold other variables. `uid`: the user that the daemon runs as.

    Raises ConfigurationError for the first setting that is unknown or invalid.
    """
    given = [
        *of_toml(toml_text or "", file),
        *of_environment(environ, PREFIX, (ENGINE_PREFIX, OPERATOR_PREFIX, ROUTER_PREFIX)),
        *of_flags(flags),
    ]
    _check_order(given)
    values, origin = read(ServerConfig, given, dict.fromkeys(ENGINE_SETTINGS, OF_ENGINES), LISTING)
    _fill_computed_defaults(values, origin, environ, uid)
    config = ServerConfig(**values)
    _check_together(config, origin)
    config = _without_self(config, origin)
    if (config.peers or config.etcd) and config.tenants and not config.cluster_secret and not config.certificate:
        problem = (
            f"set 'cluster_secret', in the configuration file or as {PREFIX}CLUSTER_SECRET, because there are 'peers' "
            "(or 'etcd') and 'tenants', and no 'certificate'; without it any process of this machine could pose as a "
            "node and obtain a tenant's cache"
        )
        expected = settings_of(ServerConfig)["cluster_secret"].kind.expected
        raise PlainRefusal("cluster_secret", problem, f"{expected}; the same on all nodes")
    ignored = [name for name in sorted(environ) if name.startswith(PREFIX) and is_service_link(name, environ[name])]
    return Settings(config, origin, tuple(ignored))


def _check_order(given: Iterable[Given]) -> None:
    """Raises ConfigurationError for a setting of the daemon that was read as a field of a table, because it stands
    behind the table's header."""
    known = settings_of(ServerConfig)
    for table, raw, source in given:
        for each in raw if isinstance(raw, list) else ():
            for name in each if table in known and isinstance(each, dict) else ():
                if name in known:
                    problem = f"the setting {name!r} stands in a table [[{table}]] ({source})"
                    raise PlainRefusal(name, problem, f"settings of the daemon come before the first [[{table}]]")


def _fill_computed_defaults(
    values: dict[str, Any], origin: dict[str, str], environ: Mapping[str, str], uid: int
) -> None:
    plain = ServerConfig()
    if "socket" not in values:
        socket = default_socket(environ, values.get("node", plain.node), uid)
        for variable in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
            if posixpath.dirname(socket) in environ.get(variable, "").split(":"):
                origin["socket"] = f"{DEFAULT}, in the directory of the variable {variable}"
        try:
            values["socket"] = settings_of(ServerConfig)["socket"].kind.parse(socket)
        except ValueError as error:
            raise refusal(ServerConfig, "socket", socket, str(error), origin["socket"]) from None
    if "control_socket" not in values:
        beside = values["socket"].removesuffix(".sock") + ".control"
        # A path that is too long for a socket turns the control socket off.
        values["control_socket"] = beside if len(beside.encode()) <= MAX_SOCKET_PATH else ""
    node = values.get("node", plain.node)
    values["kv_events"] = tuple(
        msgspec.structs.replace(
            stream,
            topic=stream.topic or f"kv@node:{node}@{stream.model}",
            endpoint=stream.endpoint or values["socket"].removesuffix(".sock") + ".kv",
        )
        for stream in values.get("kv_events", ())
    )
    if "region_size" not in values:
        memory = values.get("memory", plain.memory)
        size = max(plain.region_size, min(memory // USUAL_REGIONS, USUAL_REGION), memory // MOST_REGIONS)
        values["region_size"] = min(-(-size // HUGE_PAGE) * HUGE_PAGE, memory)


def _check_together(config: ServerConfig, origin: Mapping[str, str]) -> None:
    """Check the conditions that concern several settings together. The error names the setting to change."""

    def refuse(field: str, expected: str) -> ConfigurationError:
        shown = settings_of(ServerConfig)[field].kind.show(getattr(config, field))
        return refusal(ServerConfig, field, shown, expected, origin[field])

    if config.region_size > config.memory:
        raise refuse("region_size", f"at most 'memory', which is {format_size(config.memory)}")
    if config.huge_pages and config.region_size % HUGE_PAGE:
        raise refuse("region_size", f"a multiple of {format_size(HUGE_PAGE)}, because 'huge_pages' is true")
    if config.huge_pages and len(config.tenants) > 1:
        # A tenant can punch a hole into a region that it writes, and use up the huge pages that this frees: the daemon
        # would end by SIGBUS at its next access. Ordinary pages are allocated again.
        raise refuse("huge_pages", "false, because with several tenants one of them could end the daemon")
    tenants = {tenant.name for tenant in config.tenants} or {"default"}
    if unknown := sorted({stream.tenant for stream in config.kv_events} - tenants):
        raise refuse("kv_events", f"tenants of this daemon ({', '.join(sorted(tenants))}), not {unknown[0]!r}")
    paths = [each for stream in config.kv_events for each in stream.addresses if isinstance(each, str)]
    for path in paths:
        if paths.count(path) > 1 or path in (config.socket, config.control_socket):
            raise refuse("kv_events", f"an 'endpoint' of its own for each stream, because {path} is given twice")
        if len(path.encode(errors="surrogateescape")) > MAX_SOCKET_PATH:
            raise refuse("kv_events", f"an 'endpoint' of at most {MAX_SOCKET_PATH} bytes, which {path} has not")
    if config.dirty_share > 0.95:
        raise refuse("dirty_share", "at most 0.95: the rest is for segments that can be read")
    own = parse_address(config.advertise or config.listen)
    if config.etcd and own.host in ("0.0.0.0", "::"):
        raise refuse("advertise", f"the address at which other nodes reach this one, which is not {own.host}")
    if config.etcd and config.peers:
        raise refuse("peers", "nothing, because 'etcd' stores the members")
    for name, needed in (("etcd_certificate", "etcd_key"), ("etcd_key", "etcd_certificate"), ("etcd_key", "etcd_ca")):
        if getattr(config, name) and not getattr(config, needed):
            raise refuse(name, f"also the setting '{needed}'")
    if config.etcd_user and not config.etcd_ca and not config.unencrypted_beyond_loopback:
        for endpoint in config.etcd:
            if not is_loopback(endpoint.host):
                expected = f"also the setting 'etcd_ca': the password would go to {endpoint} without encryption"
                raise refuse("etcd_user", expected)
    if len(config.bulk_listen) > MAX_ADDRESSES or not all(is_own_address(each.host) for each in config.bulk_listen):
        raise refuse("bulk_listen", f"at most {MAX_ADDRESSES} IP addresses of this machine, each one of an interface")
    if config.transport == "nixl" and config.fabric != "trusted":
        raise refuse("transport", "also the setting 'fabric' as 'trusted', because NIXL does not encrypt")
    if config.drain_s and not config.etcd:
        raise refuse("drain_s", "0, because a node can leave the ring only where 'etcd' stores the members")
    files = {name: getattr(config, name) for name in ("certificate", "key", "ca")}
    missing = [name for name, file in files.items() if not file]
    for name, file in files.items():
        if file and missing:
            raise refuse(name, f"also the setting '{missing[0]}': 'certificate', 'key' and 'ca' belong together")
    if missing and not config.unencrypted_beyond_loopback:
        remedy = (
            "a loopback address (127.0.0.1, localhost or [::1]), because there is no 'certificate'; with "
            "'certificate', 'key' and 'ca' connections are encrypted and may leave this machine"
        )
        if not is_loopback(parse_address(config.listen).host):
            raise refuse("listen", remedy)
        for address in config.bulk_listen:
            if not is_loopback(address.host):
                raise refusal(ServerConfig, "bulk_listen", str(address), remedy, origin["bulk_listen"])
        for peer in config.peers:
            if not is_loopback(peer.host):
                raise refusal(ServerConfig, "peers", str(peer), remedy, origin["peers"])
    if config.control and missing:
        raise refuse("control", f"also the setting '{missing[0]}': callers and the daemon prove who they are")
    if config.control and config.control in (config.listen, config.metrics) and parse_address(config.control).port:
        raise refuse("control", "another address than 'listen' and 'metrics'")
    if config.control_socket == config.socket:
        raise refuse("control_socket", "another path than 'socket'")
    if config.metrics == config.listen and parse_address(config.listen).port:
        raise refuse("metrics", f"another address than 'listen', which is {config.listen}")


def _without_self(config: ServerConfig, origin: Mapping[str, str]) -> ServerConfig:
    """Remove the entry of this node from `peers`, which all nodes may share. The entry must agree with `memory` and
    with `advertise`, or with `listen` where `advertise` is empty."""
    own = parse_address(config.advertise or config.listen)
    setting = "advertise" if config.advertise else "listen"
    for peer in config.peers:
        address = Address(peer.host, peer.port)
        if peer.name == config.node and address != own:
            raise PlainRefusal(
                "peers",
                f"'peers' says that other nodes reach this node, '{config.node}', at {address} "
                f"(set by {origin['peers']}), and '{setting}' is {own}",
                f"set 'advertise' to {address}, or correct 'peers' or '{setting}'",
            )
        if peer.name == config.node and peer.memory not in (None, config.memory):
            expected = f"/{format_size(config.memory)}, as memory says, for the entry of this node"
            raise refusal(ServerConfig, "peers", str(peer), expected, origin["peers"])
        if peer.name != config.node and address == own:
            raise PlainRefusal(
                "peers",
                f"'peers' gives {address} to node '{peer.name}' (set by {origin['peers']}), and it is the '{setting}' "
                f"of this node, '{config.node}'",
                f"correct '{setting}', 'node' or 'peers'",
            )
    others = tuple(peer for peer in config.peers if peer.name != config.node)
    return msgspec.structs.replace(config, peers=others)
