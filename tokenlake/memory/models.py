"""The models of re-use of one node, by pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from tokenlake.memory.eviction.odds import Odds
from tokenlake.memory.segment import PoolId

MAX_MODELS = 64
"""Maximum number of models, some 60 KB each; that of the pool that was asked for longest ago is forgotten."""


class Models:
    """What the eviction policies learn. A pool that loses its memory, or is on disk alone, has its model still."""

    def __init__(self) -> None:
        self._odds: OrderedDict[PoolId, Odds] = OrderedDict()
        self._nodes = 1

    def of(self, pool: PoolId) -> Odds:
        """Returns the model of a pool; a new one if there is none."""
        odds = self._odds.get(pool)
        if odds is None:
            odds = self._odds[pool] = Odds()
            odds.nodes = self._nodes
            if len(self._odds) > MAX_MODELS:
                self._odds.popitem(last=False)
        self._odds.move_to_end(pool)
        return odds

    def exchange_among(self, nodes: int) -> None:
        """Set how many nodes, this one included, merge each other's statistics: each of them sees only a part of the
        requests."""
        self._nodes = nodes
        for odds in self._odds.values():
            odds.nodes = nodes

    def save(self) -> dict[PoolId, bytes]:
        """Returns the statistics of each model, encoded. Changes nothing."""
        return {pool: odds.save() for pool, odds in self._odds.items()}

    def merge(self, learned: Mapping[PoolId, bytes]) -> None:
        """Merge what `save` returned on another node into the models that are here as well. Raises ValueError for data
        that no `save` made."""
        for pool, data in learned.items():
            if pool in self._odds:
                self._odds[pool].merge(data)
