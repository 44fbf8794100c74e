"""What an engine imports: `Pool`, leases, writes, and the integrations under `engines`."""

from tokenlake_client.lease import Lease, PendingMatch
from tokenlake_client.pool import Pool
from tokenlake_client.write import Write

__all__ = ["Lease", "PendingMatch", "Pool", "Write"]
