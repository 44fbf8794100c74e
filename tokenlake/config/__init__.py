"""The settings of a daemon: `server.py` and `rules.py` declare them, `loading.py` reads them from their sources."""

from tokenlake.config.loading import ENGINE_PREFIX, OPERATOR_PREFIX, ROUTER_PREFIX, Settings, load_config
from tokenlake.config.rules import RuleSettings
from tokenlake.config.server import ServerConfig
from tokenlake.config.setting import DEFAULT
from tokenlake.config.values import (
    MASK,
    Address,
    Disk,
    KvEventStream,
    Peer,
    Secret,
    Tenant,
    format_size,
    is_loopback,
    parse_address,
    parse_size,
)

__all__ = [
    "DEFAULT",
    "ENGINE_PREFIX",
    "MASK",
    "OPERATOR_PREFIX",
    "ROUTER_PREFIX",
    "Address",
    "Disk",
    "KvEventStream",
    "Peer",
    "RuleSettings",
    "Secret",
    "ServerConfig",
    "Settings",
    "Tenant",
    "format_size",
    "is_loopback",
    "load_config",
    "parse_address",
    "parse_size",
]
