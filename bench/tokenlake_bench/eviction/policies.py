"""The policies that the study compares: those that daemons offer, and published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tokenlake.store.eviction import POLICIES, EvictionPolicy
from tokenlake_bench.eviction.arc import AdaptiveReplacement
from tokenlake_bench.eviction.s3fifo import S3Fifo

__all__ = ["PUBLISHED", "STUDIED"]

PUBLISHED: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {"s3fifo": S3Fifo, "arc": AdaptiveReplacement}
"""Policies for comparison only; daemons do not offer them."""
STUDIED: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {**POLICIES, **PUBLISHED}
"""All policies of the study, by the name that `bench eviction --policy` takes."""
