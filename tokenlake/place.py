"""Where memory is: `host`, the memory of the node, or `cuda:0`, `cuda:1`, ..., that of one of its GPUs."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["HOST", "PLACE_PATTERN", "gpu_of"]

HOST: Final = "host"
PLACE_PATTERN: Final = r"^(host|cuda:(0|[1-9][0-9]{0,2}))\Z"
"""The texts that name a place."""


def gpu_of(place: str) -> int | None:
    """The number of the GPU whose memory `place` names; None for `host`. Raises ValueError for another text."""
    if not re.match(PLACE_PATTERN, place):
        raise ValueError(f"{place!r} is no place; expected 'host' or 'cuda:' and the number of a GPU")
    return None if place == HOST else int(place.partition(":")[2])
