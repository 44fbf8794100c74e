"""The members of the cluster and their addresses: a static list, or etcd.

Nothing in the data path waits for a membership: the daemon serves with the members that it knows. Whether a node is
alive is decided by pings (`tokenlake.core.cluster.peers`) and never by a membership.
"""

from tokenlake_server.membership.base import Account, Members, Membership, MembershipState, alone
from tokenlake_server.membership.opening import open_membership
from tokenlake_server.membership.static import static_members

__all__ = ["Account", "Members", "Membership", "MembershipState", "alone", "open_membership", "static_members"]
