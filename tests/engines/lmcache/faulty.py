"""The L2 adapter with injected faults: a server whose flag names this module has those of its environment."""

from __future__ import annotations

from tests.engines.faults import begin
from tokenlake_client.engines.common import pages
from tokenlake_client.engines.lmcache.adapter import TokenLakeL2

__all__ = ["TokenLakeL2"]

begin((pages, ("_into",)), calls=0.15, messages=0.4)
