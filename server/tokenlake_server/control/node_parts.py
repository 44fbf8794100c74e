"""The parts of a daemon that its control plane uses. Imports no grpcio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenlake.config import ServerConfig
from tokenlake_server.cold.tier import ColdTier
from tokenlake_server.disk.tier import DiskTier
from tokenlake_server.engines.listener import EngineListener
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.loop.driver import Driver
from tokenlake_server.membership import Membership
from tokenlake_server.metrics_page import Snapshot
from tokenlake_server.peers.measurement import PeerMeasurement
from tokenlake_server.peers.states import PeerState
from tokenlake_server.start.standing_orders import StandingOrders


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The functions are called on the control loop."""

    config: ServerConfig
    origin: Mapping[str, str]
    """The source of each setting."""
    driver: Driver
    engines: EngineListener
    membership: Membership
    tenants: Tenants
    snapshot: Callable[[], Snapshot]
    peers: Callable[[], Mapping[str, PeerState]]
    """The states of the other members."""
    controls: Callable[[], Mapping[str, str]]
    """Where each node serves its control plane."""
    measurement: PeerMeasurement
    orders: StandingOrders
    disk: DiskTier
    cold: ColdTier
    page_address: str
    """host:port at which the node serves its page; empty if it does not."""
