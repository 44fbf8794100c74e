"""Settings of Python's garbage collector that keep its pauses out of the control loop.

A full collection visits every object: 80 ms with 100,000 segments, and with Python's default thresholds about one per
thousand requests. The rules make hardly any reference cycles, so a full collection frees little and may be rare.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

THRESHOLDS = (700, 5, 300)
"""Arguments of `gc.set_threshold`: a full collection comes about once per million objects that were made and kept."""


def set_up(on_collection: Callable[[str, dict[str, int]], None]) -> None:
    """Set the thresholds of the whole process, and exclude all present objects from later collections. Called once,
    after all modules are loaded. `on_collection` is added to `gc.callbacks`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(on_collection)
