"""Hot segments: how often each is read, how many copies that asks for, where they go, and what every node knows."""

from tokenlake.hot.rate import Rate
from tokenlake.hot.sketch import Heavy, SpaceSaving

__all__ = ["Heavy", "Rate", "SpaceSaving"]
