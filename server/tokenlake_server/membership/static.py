"""The membership of the setting `peers`: the list of the configuration, at epoch 0."""

from __future__ import annotations

from tokenlake.config import Address, ServerConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import MembershipRefused
from tokenlake_server.membership.base import Account, Members, MembershipState, OnMembers

_NEEDS_ETCD = (
    "the members of this node are a list in its settings ('peers'), which no command changes: edit 'peers' on all "
    "nodes and restart them one at a time, or set 'etcd'"
)


def static_members(config: ServerConfig) -> Members:
    """The members that `peers` lists, and this node. Without sizes in `peers` all nodes have the same weight."""
    sized = any(peer.memory for peer in config.peers)
    weights = {config.node: config.memory if sized else 1}
    weights |= {peer.name: peer.memory or 1 for peer in config.peers}
    addresses = {peer.name: Address(peer.host, peer.port) for peer in config.peers}
    return Members(RingRecord.of(weights), addresses)


class StaticMembership:
    """The members that the setting `peers` lists. They do not change while the daemon runs."""

    def __init__(self, config: ServerConfig) -> None:
        self.members = static_members(config)
        self.state = MembershipState("peers", known=True, epoch=self.members.record.epoch)

    def start(self, address: Address, changed: OnMembers) -> None:
        """Do nothing: the members of a static list never change."""

    def refresh(self) -> None:
        """Do nothing: a static list is never read again."""

    def proven(self, node: str, incarnation: int) -> None:
        """Do nothing: no node joins a static list."""

    async def drain(self, node: str = "") -> None:
        """Raises `MembershipRefused`."""
        raise MembershipRefused(_NEEDS_ETCD)

    async def remove(self, node: str) -> None:
        """Raises `MembershipRefused`."""
        raise MembershipRefused(_NEEDS_ETCD)

    async def leave(self, account: Account) -> None:
        """Raises `MembershipRefused`."""
        raise MembershipRefused(_NEEDS_ETCD)

    async def close(self) -> None:
        """Do nothing: a static list holds no resources."""
