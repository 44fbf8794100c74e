"""The members of the cluster, as a node knows them."""

from __future__ import annotations

from typing import NamedTuple

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.identity import NodeId
from tokenlake.location import Location


class MemberState(NamedTuple):
    """The state of one member of the cluster."""

    node: NodeId
    usable: bool
    """False: no call can be sent to it now."""
    draining: bool
    load: float
    """Bytes per second that it sends to engines of other nodes."""
    free: float
    """Share of its memory that is free, as it reported last."""
    location: Location
    """Its location, as it told when it connected last."""


def members_of(context: Context, peers: Peers) -> list[MemberState]:
    """The state of each member, this node included, by name."""
    load, free = context.load(), context.vacancy().free_share
    here = MemberState(context.node, True, context.draining, load, free, context.config.location)
    others = [
        MemberState(
            each.node, each.usable, each.draining, peers.load(each.node), each.vacancy.free_share, each.location
        )
        for each in peers
    ]
    return sorted([here, *others])
