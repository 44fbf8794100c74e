"""The client of a daemon's control plane, over gRPC: `pip install 'tokenlake[control]'`.

`Control` calls the services of `proto/tokenlake/v1`. `ControlPlane` is the interface of a scheduler over it.
"""

from tokenlake_client.control.client import Certificates, Control
from tokenlake_client.control.fleet import FleetRouter
from tokenlake_client.control.plane import ControlPlane

__all__ = ["Certificates", "Control", "ControlPlane", "FleetRouter"]
