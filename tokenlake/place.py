"""Where memory is: `host`, the memory of the node, or `cuda:0`, `cuda:1`, ..., that of one of its GPUs."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

__all__ = ["HOST", "Place"]

HOST: Final = "host"
Place = Annotated[str, Meta(max_length=64)]
"""The name of a place, in messages. A client refuses regions at places that it does not know."""
