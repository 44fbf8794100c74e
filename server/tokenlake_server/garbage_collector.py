"""Python's garbage collector, set up for a loop that nothing may hold for long.

A full collection looks at every object there is: 80 ms with 100,000 segments, and with Python's settings there is
one about every thousand requests. The rules free what they made by reference counts, so a full collection finds
next to nothing; it only has to come at some time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

__all__ = ["set_up"]

THRESHOLDS = (700, 5, 300)
"""Objects more than before until the young are looked at; how many such looks until the middle-aged are; how many of
those until all are: about one in a million objects that were made and kept."""


def set_up(told: Callable[[str, dict[str, int]], None]) -> None:
    """For the whole process, once all modules are loaded: what is there now is never looked at again. `told` is
    called as `gc.callbacks` are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(told)
