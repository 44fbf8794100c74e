"""The bytes that engines make the daemon keep, by tenant: unread answers, parts of frames, unanswered requests.

Each of them is charged to a connection and to its tenant before it is kept. A connection has a limit, and the tenants
share the total in equal parts, so that no tenant takes the part of another.
"""

from __future__ import annotations

from tokenlake.errors import LimitReached

TOTAL_BYTES = 48 << 20
"""Limit of the bytes that all engines together make the daemon keep."""
MAX_OF_CONNECTION = 16 << 20
"""Limit of the bytes of one connection."""
CONNECTION_BYTES = 8 << 10
"""Bytes that are charged for a connection itself: its objects here and in the rules."""


class KeptBytes:
    """The bytes kept for all tenants of a daemon. Used on the control loop only."""

    def __init__(self, tenants: int, total: int = TOTAL_BYTES) -> None:
        """`tenants`: the number of tenants that share `total` bytes."""
        self.share = total // max(1, tenants)
        """Limit of the bytes of one tenant."""
        self._by_tenant: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        """The bytes kept for a tenant now."""
        return self._by_tenant.get(tenant, 0)

    def change(self, tenant: str, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the bytes of a tenant."""
        left = self.of(tenant) + nbytes
        if left:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)


class Account:
    """The bytes that one connection of a tenant makes the daemon keep."""

    def __init__(self, kept: KeptBytes, tenant: str) -> None:
        self._kept = kept
        self._tenant = tenant
        self._nbytes = 0

    def charge(self, nbytes: int) -> None:
        """Count `nbytes` that are about to be kept, or, if negative, that are kept no longer. Raises `LimitReached`,
        and counts nothing, for bytes beyond the limit of the connection or of its tenant."""
        if nbytes > 0:
            if self._nbytes + nbytes > MAX_OF_CONNECTION:
                raise LimitReached(
                    f"unanswered requests and unread answers of this connection would take {self._nbytes + nbytes} "
                    f"bytes; limit 'connection_bytes' is {MAX_OF_CONNECTION}"
                )
            if self._kept.of(self._tenant) + nbytes > self._kept.share:
                raise LimitReached(
                    f"unanswered requests and unread answers of tenant '{self._tenant}' would take "
                    f"{self._kept.of(self._tenant) + nbytes} bytes; limit 'tenant_bytes' is {self._kept.share}"
                )
        self._nbytes += nbytes
        self._kept.change(self._tenant, nbytes)

    def close(self) -> None:
        """Count nothing for the connection any more. Idempotent."""
        self.charge(-self._nbytes)
