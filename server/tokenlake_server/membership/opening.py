"""Chooses the membership that the settings name."""

from __future__ import annotations

import asyncio

from tokenlake.config import Address, ServerConfig
from tokenlake_server.membership.base import Membership
from tokenlake_server.membership.static import StaticMembership

__all__ = ["open_membership"]


def open_membership(
    config: ServerConfig, address: Address, incarnation: int, version: str, loop: asyncio.AbstractEventLoop
) -> Membership:
    """The membership of a daemon that runs on `loop`. `address`: where other daemons reach this one.
    `version`: that of the daemon. Raises `ModuleNotFoundError` where `etcd` is set and grpcio is not installed."""
    if not config.etcd:
        return StaticMembership(config)
    from tokenlake_server.membership.etcd import EtcdMembership  # grpcio is an extra

    return EtcdMembership(config, address, incarnation, version, loop)
