"""Limits of the memory, views and buffers that a tenant makes this process keep. Tenants have equal shares of each
total, so that no tenant takes the share of another."""

from __future__ import annotations

import threading

from tokenlake.errors import LimitReached

TOTALS = {
    "buffers": 1 << 14,
    "buffer_bytes": 64 << 30,
    "frame_bytes": 64 << 20,
    "segments": 1 << 21,
    "views": 1 << 17,
}
"""Limits of all tenants together: query buffers and their bytes, which are mapped and may be sparse; bytes of
frames that have not arrived whole; segments of open views (a segment counts in each view); open views. Linux allows a
process 65,530 mappings."""


class TenantLimits:
    """Counts the memory, views and buffers that are kept for each tenant. Thread-safe."""

    def __init__(self, tenants: int) -> None:
        """`tenants`: the number of tenants that share each total."""
        self._shares = {kept: max(1, total // max(1, tenants)) for kept, total in TOTALS.items()}
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str], int] = {}

    def add(self, tenant: str, **amounts: int) -> None:
        """Count amounts (keywords: the keys of `TOTALS`) that are about to be kept for a tenant, or, if negative, that
        are kept no longer. Raises LimitReached, and counts nothing, where the tenant would have more than its share."""
        with self._lock:
            after = {(tenant, kept): self._used.get((tenant, kept), 0) + amount for kept, amount in amounts.items()}
            for (_, kept), total in after.items():
                if amounts[kept] > 0 and total > self._shares[kept]:
                    raise LimitReached(
                        f"tenant '{tenant}' would have {total} {kept} at this query engine; its share is "
                        f"{self._shares[kept]}"
                    )
            self._used.update(after)
            for name, total in after.items():
                if not total:
                    del self._used[name]
