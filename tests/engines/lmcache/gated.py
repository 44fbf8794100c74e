"""LMCache's adapter whose leases stop at the tests' gate: named in the place of the client's module."""

from __future__ import annotations

from tests.engines import gate
from tokenlake_client.engines.lmcache import TokenLakeL2

__all__ = ["TokenLakeL2"]

gate.install()
