"""Chooses the membership that the settings name."""

from __future__ import annotations

import asyncio

from tokenlake.config import ServerConfig
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.membership.base import Membership
from tokenlake_server.membership.static import StaticMembership
from tokenlake_server.start.start_errors import ModuleMissing


def open_membership(
    config: ServerConfig, incarnation: int, loop: asyncio.AbstractEventLoop, thread: AdminThread
) -> Membership:
    """The membership of a daemon that runs on `loop`. `thread` runs its gRPC; the caller closes it. Raises
    `ModuleMissing` where `etcd` is set and grpcio is not installed."""
    if not config.etcd:
        return StaticMembership(config)
    try:
        from tokenlake_server.membership.etcd import EtcdMembership  # grpcio is an extra
    except ModuleNotFoundError as error:
        raise ModuleMissing("etcd", ",".join(map(str, config.etcd)), error.name, "etcd") from error

    return EtcdMembership(config, incarnation, loop, thread)
