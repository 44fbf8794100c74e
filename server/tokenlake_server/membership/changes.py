"""The changes of a ring record that a daemon or an operator makes."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import MembershipRefused
from tokenlake_server.membership.stored import Stored


def draining(cluster: str, node: str, *, alive: bool = False) -> Callable[[Stored], RingRecord]:
    """The edit after which a member drains. It raises `MembershipRefused` for a node that is no member, and with
    `alive` for one whose daemon is not registered, or not proven: such a daemon would not follow the new record."""

    def edit(stored: Stored) -> RingRecord:
        record = _record(stored)
        if node not in record.members:
            raise MembershipRefused(f"'{node}' is not a member of the cluster '{cluster}': {_names(record)}")
        found = stored.nodes.get(node)
        if alive and found is not None and found.registration is not None and not found.registration.proven_by:
            raise MembershipRefused(
                f"no member has proven the daemon of '{node}', so that it cannot hand anything over; `tokenlake remove "
                f"{node}` takes the name out of the ring"
            )
        if alive and found is None:
            raise MembershipRefused(
                f"the daemon of '{node}' is not registered in etcd, so that it cannot hand anything over; `tokenlake "
                f"remove {node}`, if it is gone for good"
            )
        return record.draining(node)

    return edit


def removed(cluster: str, node: str, *, dead: bool = False) -> Callable[[Stored], RingRecord]:
    """The edit that takes a node out of the record, if it is there. `dead`: the edit raises `MembershipRefused` for a
    node that is no member, or whose daemon is registered and was proven."""

    def edit(stored: Stored) -> RingRecord:
        record = _record(stored)
        if dead and node not in record.members:
            raise MembershipRefused(f"'{node}' is not a member of the cluster '{cluster}': {_names(record)}")
        found = stored.nodes.get(node)
        if dead and found is not None and (found.registration is None or found.registration.proven_by):
            raise MembershipRefused(
                f"the daemon of '{node}' runs, or ended within the last seconds: its registration in etcd is live. "
                f"`tokenlake drain {node}` lets it hand its segments over and leave"
            )
        return record.without(node)

    return edit


def _record(stored: Stored) -> RingRecord:
    if stored.record is None:
        raise MembershipRefused("etcd has no ring record of this cluster: no daemon has joined yet")
    return stored.record


def _names(record: RingRecord) -> str:
    return f"its members are {', '.join(record.members)}" if record.members else "it has no members"
