"""The location of a node: labels of the domains that the node is in, the widest domain first.

::

    room-2/rack-7/nvlink-1      levels to room-2/rack-7/nvlink-1: 0
                                          room-2/rack-7/nvlink-4: 1
                                          room-2/rack-9/nvlink-1: 2, because a label counts below those before it

A domain is what its nodes share: links that are faster than those to other nodes, or a cause of failure.
"""

from __future__ import annotations

import re

Location = tuple[str, ...]
NOWHERE: Location = ()
"""The location of a node that has no labels."""
MAX_LABELS = 4
LOCATION_EXPECTED = f"1 to {MAX_LABELS} labels with / between them, each of 1 to 64 letters, digits, dots, _ or -"
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_location(text: str) -> Location:
    """The location that a text names; `NOWHERE` for an empty text. Raises ValueError with `LOCATION_EXPECTED`."""
    labels = tuple(text.split("/")) if text else NOWHERE
    if len(labels) > MAX_LABELS or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(LOCATION_EXPECTED)
    return labels


def shown_location(location: Location) -> str:
    """The inverse of `parse_location`."""
    return "/".join(location)


def levels(a: Location, b: Location) -> int:
    """Returns how many levels lie between two nodes: the labels of the longer location behind those that both begin
    with. 0: the innermost domains are the same, or neither node has labels."""
    shared = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        shared += 1
    return max(len(a), len(b)) - shared
