"""The client of a pool: `Pool`, and what its calls take and return; programs import these names from `tokenlake`.
Integrations are under `engines` and `routers`, the control plane's client under `control`, and `testing` has a pool in
memory."""

from tokenlake_client.deadlines import Deadlines
from tokenlake_client.lease import Lease
from tokenlake_client.match import MatchOptions, PendingMatch
from tokenlake_client.pool import Pool
from tokenlake_client.write import Write

__all__ = ["Deadlines", "Lease", "MatchOptions", "PendingMatch", "Pool", "Write"]
