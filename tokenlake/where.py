"""Where the memory of a region is: `host`, or `cuda:0`, `cuda:1`, ... for that of one of the node's GPUs."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

HOST: Final = "host"
Where = Annotated[str, Meta(max_length=64)]
"""The name of a place, in messages. A client refuses regions at places that it does not know."""


def device_of(where: str) -> int:
    """The number of the GPU whose memory `where` names; -1 for `host`. Raises ValueError for another text."""
    if where == HOST:
        return -1
    kind, _, number = where.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise ValueError(f"{where!r} is no place; expected 'host' or 'cuda:' and the number of a GPU")
    return int(number)
