"""Chooses the membership that the settings name."""

from __future__ import annotations

import asyncio

from tokenlake.config import ServerConfig
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.membership.base import Membership
from tokenlake_server.membership.static import StaticMembership


def open_membership(
    config: ServerConfig, incarnation: int, loop: asyncio.AbstractEventLoop, thread: AdminThread
) -> Membership:
    """The membership of a daemon that runs on `loop`. `thread` runs its gRPC; the caller closes it."""
    if not config.etcd:
        return StaticMembership(config)
    from tokenlake_server.membership.etcd import EtcdMembership  # only where asked for: gRPC takes memory

    return EtcdMembership(config, incarnation, loop, thread)
