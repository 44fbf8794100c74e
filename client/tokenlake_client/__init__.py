"""The client that an engine imports: `Pool`, its leases and writes; integrations are under `engines`."""

from tokenlake_client.deadlines import Deadlines
from tokenlake_client.lease import Lease
from tokenlake_client.match import MatchOptions, PendingMatch
from tokenlake_client.pool import Pool
from tokenlake_client.write import Write

__all__ = ["Deadlines", "Lease", "MatchOptions", "PendingMatch", "Pool", "Write"]
