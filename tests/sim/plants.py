"""Planted bugs as parameters of tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
"""Breaks a rule until the test is over."""


def planted(plants: Collection[Plant]) -> list[Any]:
    """One parameter for each bug."""
    return [pytest.param(plant, marks=pytest.mark.nightly, id=plant.__name__) for plant in plants]
