"""Mappings that an engine does not use any more."""

from __future__ import annotations

import weakref
from typing import cast

from tokenlake_client.regions import IDLE_S, Mapping, Regions


class FakeMapping:
    """Replaces a mapping, of which the test observes only the lifetime."""


def test_an_idle_mapping_is_dropped() -> None:
    """An engine drops mappings that it does not use. Otherwise it keeps two descriptors and the memory of each region
    that was given to another tenant."""
    now = [0.0]
    opened: list[tuple[int, bool]] = []
    lives: dict[int, weakref.ref[Mapping]] = {}

    def open_region(region: int, write: bool) -> Mapping:
        opened.append((region, write))
        made = cast(Mapping, FakeMapping())
        lives[region] = weakref.ref(made)
        return made

    regions = Regions(open_region, lambda: now[0])
    regions.get(1)
    held = regions.get(2)
    now[0] = IDLE_S
    assert regions.get(1) is not None
    now[0] = IDLE_S + 1
    regions.get(3)
    assert lives[1]() is not None, "used a second ago"
    assert lives[2]() is held, "an array of it is alive"
    del held
    assert lives[2]() is None
    regions.get(2)
    assert opened == [(1, False), (2, False), (3, False), (2, False)]
