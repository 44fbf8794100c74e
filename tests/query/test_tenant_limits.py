"""Tenants have equal shares of what this process keeps."""

from __future__ import annotations

import pytest

from tokenlake.errors import LimitReached
from tokenlake_query.tenant_limits import TOTALS, TenantLimits


def test_a_tenant_has_its_share() -> None:
    limits = TenantLimits(2)
    share = TOTALS["views"] // 2
    limits.add("red", views=share, segments=1)
    with pytest.raises(LimitReached, match=f"'red' would have {share + 1} views"):
        limits.add("red", segments=1, views=1)
    limits.add("red", segments=TOTALS["segments"] // 2 - 1)
    limits.add("blue", views=share, segments=TOTALS["segments"] // 2)
    limits.add("red", views=-1)
    limits.add("red", views=1)
