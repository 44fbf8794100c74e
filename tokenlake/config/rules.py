"""The settings of the rules, which a daemon's configuration and a `CoreConfig` have in common."""

from typing import Annotated

import msgspec

from tokenlake.config import kinds
from tokenlake.config.setting import Setting
from tokenlake.store.eviction import POLICIES

__all__ = ["RuleSettings"]

_SHARE = kinds.real(0.01, 1, "a share of the slots")
_SECONDS = kinds.real(0.1, 3600, "seconds")


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds; shares are fractions of the node's slots."""

    lease_s: Annotated[
        float,
        Setting(
            _SECONDS,
            "time without a heartbeat after which an engine's session expires; engines send three in this time",
            why="two heartbeats may be lost, and the leases of a dead engine end soon",
        ),
    ] = 10.0
    reservation_s: Annotated[
        float,
        Setting(
            _SECONDS,
            "time between prepare and commit, after which a reservation expires",
            why="longer than the prefill of a long prompt",
        ),
    ] = 30.0
    run_length: Annotated[
        int,
        Setting(
            kinds.whole(0, 1024),
            "number of consecutive segments that are kept on one node; 0 chooses 1 below 16 nodes and 4 from 16 on",
            why="from 16 nodes on, single segments spread a prefix over too many nodes (measured)",
        ),
    ] = 0
    eviction: Annotated[
        str,
        Setting(
            kinds.one_of(*POLICIES),
            "policy by which a full node chooses the primary copies to evict, and the segments not to store "
            "([policies](operations.md#eviction)); the same on all nodes, which compare retention values",
            why="on eight nodes its hit rate is at least that of the other policies on each measured trace",
        ),
    ] = "reuse"
    hot: Annotated[
        str,
        Setting(
            kinds.one_of("on", "observe", "off"),
            "on: a segment whose reads overload its node is copied to more nodes; observe: the node only logs the "
            "copies that it would make",
            why="without copies, the one node that has a prompt template of all requests is the bottleneck",
        ),
    ] = "on"
    cached_share: Annotated[
        float,
        Setting(
            _SHARE,
            "share up to which cached copies may displace primary copies; above it they may only while all cached "
            "copies are in use",
            why="enough for the segments that an engine reads and writes at a time; each further cached copy takes the "
            "slot of a primary copy",
        ),
    ] = 0.03
    dirty_share: Annotated[
        float,
        Setting(
            _SHARE,
            "limit of slots that are being written or whose segment waits to be sent to its owner; above it a store is "
            "refused",
            why="a buffer for writes while the network is slower than the engines",
        ),
    ] = 0.10
    replica_share: Annotated[
        float,
        Setting(_SHARE, "limit of slots for replicas of hot segments", why="some tens of segments are hot at a time"),
    ] = 0.05
    session_lease_share: Annotated[
        float,
        Setting(
            _SHARE,
            "limit of slots that matches lease to one session; the session's fetches may lease half of the other slots "
            "in addition",
            why="other sessions can always lease some slots",
        ),
    ] = 0.75
    session_reserve_share: Annotated[
        float,
        Setting(
            _SHARE,
            "limit of slots that one session has reserved",
            why="less than may be leased, because reserved slots cannot be read yet",
        ),
    ] = 0.25
    background_share: Annotated[
        float,
        Setting(
            kinds.real(0.01, 0.99, "a share of the bytes that come in from other nodes"),
            "share of new segments that this node takes as their owner, and of copies of hot segments, while engines "
            "of this node fetch from other nodes",
            why="as much as for fetches; with less, other nodes could not send new segments fast enough and would "
            "refuse stores",
        ),
    ] = 0.5
    max_sessions: Annotated[
        int,
        Setting(
            kinds.whole(1, 65536),
            "limit of engines that are connected at a time",
            why="8 engines of 8 ranks, with room for restarts; the limit bounds file descriptors and maps",
        ),
    ] = 256
