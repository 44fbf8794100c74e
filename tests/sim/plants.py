"""Planted bugs as parameters of tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

__all__ = ["Plant", "planted"]

Plant = Callable[[pytest.MonkeyPatch], None]
"""Breaks a rule until the test is over."""


def planted(plants: Collection[Plant], slow: Collection[Plant]) -> list[Any]:
    """One parameter for each bug. `make fast` leaves out those of `slow`."""
    return [pytest.param(plant, marks=pytest.mark.slow if plant in slow else (), id=plant.__name__) for plant in plants]
