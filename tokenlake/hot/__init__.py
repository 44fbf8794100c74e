"""Hot segments: how often each is read, how many copies that asks for, where they go, and what every node knows."""

from tokenlake.hot.known import KnownSets
from tokenlake.hot.places import by_a_further_hash, draws, less_loaded_of_two
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
    "by_a_further_hash",
    "draws",
    "fair_mean",
    "less_loaded_of_two",
]
