"""Hot segments: counting reads, deciding how many copies each needs, where they go, and which copy is read."""

from tokenlake.hot.choice import less_loaded_of_two, rendezvous_order, splitmix64
from tokenlake.hot.known import KnownSets
from tokenlake.hot.rate import Rate
from tokenlake.hot.rule import COUNTERS, Change, HotItem, HotRule, Shape, fair_mean
from tokenlake.hot.sketch import Heavy, SpaceSaving

__all__ = [
    "COUNTERS",
    "Change",
    "Heavy",
    "HotItem",
    "HotRule",
    "KnownSets",
    "Rate",
    "Shape",
    "SpaceSaving",
    "fair_mean",
    "less_loaded_of_two",
    "rendezvous_order",
    "splitmix64",
]
