"""SGLang's storage backend whose leases stop at the tests' gate: named in the place of the client's module."""

from __future__ import annotations

from tests.engines import gate
from tokenlake_client.engines.sglang import TokenLakeStorage

__all__ = ["TokenLakeStorage"]

gate.install()
