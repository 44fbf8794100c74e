"""The transformers engine on a device: tokens, times to the first token, and the rates of its copies."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tokenlake_bench.gpu.base import NotRun, Rig, Row, device_named


def transformers(rig: Rig) -> Iterator[Row]:
    """The rows of `transformers_rows`. On the device of tests a small model computes in host memory."""
    device_named(rig.device)
    if find_spec("transformers") is None:
        raise NotRun("transformers is not installed")
    # Imported here, because it takes seconds and other checks run without it.
    from tokenlake_bench.gpu.transformers_rows import rows

    yield from rows(rig)
