"""The settings of the rules: what a daemon's configuration and a `CoreConfig` have in common."""

from typing import Annotated

import msgspec

from tokenlake.config import kinds
from tokenlake.config.setting import Setting
from tokenlake.store.eviction import POLICIES

__all__ = ["RuleSettings"]

_SHARE = kinds.real(0.01, 1, "a share of the slots")
_SECONDS = kinds.real(0.1, 3600, "seconds")


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds, shares are of the node's slots."""

    lease_s: Annotated[
        float,
        Setting(
            _SECONDS,
            "time without a heartbeat after which an engine's session expires; heartbeats come three times as often",
            why="a lost heartbeat does no harm, and the lease of a dead engine ends soon",
        ),
    ] = 10.0
    reservation_s: Annotated[
        float,
        Setting(_SECONDS, "time from prepare to commit", why="the longest prefill that we expect between them"),
    ] = 30.0
    run_length: Annotated[
        int,
        Setting(
            kinds.whole(0, 1024),
            "number of consecutive segments that are kept on one node; 0 chooses 1 below 16 nodes and 4 from 16 on",
            why="measured: from 16 nodes on, a prefix would otherwise touch too many nodes",
        ),
    ] = 0
    eviction: Annotated[
        str,
        Setting(
            kinds.one_of(*POLICIES),
            "policy that chooses which primary copies a full node evicts first and what it does not store; see "
            "operations.md. Give all nodes the same: nodes compare the worth of their victims",
            why="on eight nodes it keeps at least what the other policies keep, in each trace that we tried",
        ),
    ] = "reuse"
    hot: Annotated[
        str,
        Setting(
            kinds.one_of("on", "observe", "off"),
            "on: a segment that is read so often that its node is overloaded is copied to more nodes; observe: the "
            "node counts and reports the copies that this would take",
            why="without copies one template that all requests share makes its node the bottleneck",
        ),
    ] = "on"
    cached_share: Annotated[
        float,
        Setting(
            _SHARE,
            "share up to which cached copies may displace primary copies; beyond it only when all of them are in use",
            why="the segments that an engine reads and writes at a time have a place; each cached copy takes the place "
            "of a segment that could be found",
        ),
    ] = 0.03
    dirty_share: Annotated[
        float,
        Setting(
            _SHARE,
            "most slots that are being written or wait to be pushed; beyond it a store is refused",
            why="writes that pile up while the network is slower than the engines",
        ),
    ] = 0.10
    replica_share: Annotated[
        float,
        Setting(_SHARE, "most slots for extra copies of hot segments", why="some tens of segments are hot at a time"),
    ] = 0.05
    session_lease_share: Annotated[
        float,
        Setting(
            _SHARE,
            "most slots that a match may lease to one session; its fetches may hold half of the rest as well",
            why="another session can always read something",
        ),
    ] = 0.75
    session_reserve_share: Annotated[
        float,
        Setting(
            _SHARE,
            "most slots that one session may have reserved",
            why="reserved slots hold nothing readable yet, hence less than may be leased",
        ),
    ] = 0.25
    background_share: Annotated[
        float,
        Setting(
            kinds.real(0.01, 0.99, "a share of the bytes that come in from other nodes"),
            "most that pushes and copies of hot segments may take while engines of this node read from other nodes",
            why="as much as reads get; less would keep the writers of other nodes waiting until they are refused",
        ),
    ] = 0.5
    max_sessions: Annotated[
        int,
        Setting(
            kinds.whole(1, 65536),
            "most engines that are connected at a time",
            why="8 engines of 8 ranks, with room for restarts; it bounds file descriptors and maps",
        ),
    ] = 256
