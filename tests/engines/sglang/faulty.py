"""The storage backend with injected faults: an engine whose flag names this module has those of its environment."""

from __future__ import annotations

from tests.engines.faults import begin
from tokenlake_client.engines.common import pages
from tokenlake_client.engines.sglang.storage import TokenLakeStorage

__all__ = ["TokenLakeStorage"]

begin((pages, ("_into",)), calls=0.2, messages=0.5)
