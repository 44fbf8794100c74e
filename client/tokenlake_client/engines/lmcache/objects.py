"""The objects of one form in the pool: looked up and leased, loaded into LMCache's memory, and stored from it. Imports
no engine. One object is one segment, and its name is that of a page."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenlake.errors import Unreachable
from tokenlake_client.engines.common.pages import WINDOW, PageStore, Parts, move, out_of

MAX_LOSSES = 4
"""Limit of the lost objects of one load, after which the load ends: each may cost the deadline of a transfer."""


class ObjectStore(PageStore):
    """Looks up, loads and stores the objects of one form. LMCache unlocks what a lookup has found."""

    def lock(self, names: Sequence[str]) -> list[bool]:
        """Whether the pool has each of the objects. They stay leased until `unlock`, or for `lease_s`. Never raises."""
        found, lease = self.find_each(names)
        if lease is None:
            self._count_lookup(not_asked=len(names))
            return found
        here, hits = lease.local_hits, lease.hits
        self._count_lookup(here=here, remote=hits - here, missing=len(names) - hits)
        self.keep(names, found, lease, range(len(names)))
        return found

    def unlock(self, names: Sequence[str]) -> None:
        """End the leases of the objects, each that of one lookup."""
        self.leases.drop(names)

    def load_each(self, names: Sequence[str], places: Sequence[Parts]) -> list[bool]:
        """Copy objects into LMCache's memory at `places`, those that are leased and those that the pool still has.
        Returns whether each object is there. Never raises."""
        began = time.perf_counter()
        loaded = [False] * len(names)
        again = [name for name in names if self.leases.where(name) is None]
        try:
            if again:
                found, lease = self.find_each(again)
                if lease is not None:
                    self.keep(again, found, lease, range(len(again)))
            at = losses = 0
            while at < len(names) and losses < MAX_LOSSES:
                count, asked = self._load_run(names[at:], places[at:])
                loaded[at : at + count] = [True] * count
                losses += count < asked
                at += count + (count < asked)
        except Unreachable:
            pass
        except Exception as error:
            self._report("loading objects", error)
        finally:
            # LMCache unlocks only what its own lookup has found.
            self.unlock(again)
        done = sum(loaded)
        self._counters.add(
            tokens_loaded=done * self._kind.tokens,
            loads_failed=int(done < len(names)),
            load_seconds=time.perf_counter() - began,
        )
        return loaded

    def _load_run(self, names: Sequence[str], places: Sequence[Parts]) -> tuple[int, int]:
        """Load the first of `names` that follow each other in one lease. Returns the numbers of loaded and of wanted
        objects. Raises `Unreachable`."""
        held = self.leases.where(names[0])
        if held is None:
            return 0, 1
        lease, first = held
        asked = 1
        while asked < min(len(names), WINDOW) and self.leases.where(names[asked]) == (lease, first + asked):
            asked += 1
        arrays = lease.fetch(first, first + asked)
        copies = [
            copy
            for array, parts in zip(arrays, places, strict=False)
            for copy in out_of(array.ctypes.data, array.nbytes, parts)
        ]
        self._copy.each(move, copies, sum(array.nbytes for array in arrays))
        return len(arrays), asked
