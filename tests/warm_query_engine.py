"""Imported by the fork server of the tests' query engines: what each query engine would import by itself."""

from __future__ import annotations

import tokenlake_query.__main__
import tokenlake_query.kernels.torch_cpu  # noqa: F401

__all__: list[str] = []
