"""Pages that an engine names by hashes: looked up in the pool, loaded into the engine's host memory, and stored from
it.

One page is one segment. It is copied once in each direction, by the processor, between the engine's host memory and the
arena; a page's parts (keys and values of all layers, or of each layer) follow each other in the segment::

    host memory  |..K of page 7..|      |..V of page 7..|
                          \\               /
    arena                |K of page 7|V of page 7|
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.held_leases import HeldLeases
from tokenlake_client.engines.common.page_counts import PageCounters
from tokenlake_client.engines.common.page_settings import PageSettings
from tokenlake_client.lease import Lease
from tokenlake_client.match import MatchOptions
from tokenlake_client.parallel_copy import ParallelCopy
from tokenlake_client.pool import Pool

KEY_S = 20e-6
"""Seconds for each page beside the deadline of a lookup."""
WINDOW = 32
"""Pages that are transferred to this node, and then copied, at a time."""
STORED = (Code.COMMITTED, Code.EXISTS)
_LEASED = (Code.LOCAL, Code.REMOTE)

Parts = Sequence[tuple[int, int]]
"""The places of one page in the engine's host memory, in the order of the segment: (address, bytes) of each part."""


@dataclass(frozen=True, slots=True)
class PageKind:
    """The constants of one cache pool of an engine, such as that of keys and values, or of recurrent states."""

    group: int
    """The number of the cache pool in the keys."""
    tokens: int
    """The tokens of a page; 0: its pages are not counted, because those of another cache pool or rank stand for the
    same tokens."""


class PageStore:
    """Looks up, loads and stores the pages of one cache pool. The engine has one thread each for lookups, loads and
    stores."""

    def __init__(
        self,
        kind: PageKind,
        connection: Connection,
        weights: Callable[[], str | None],
        settings: PageSettings,
        counters: PageCounters,
        report: Callable[[str, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connection`: that of the layout of these pages; its `get` does not wait. This object closes it. `weights`
        returns the digest of the weights that have changed in place, None for those of the layout; it raises
        `Unreachable` while the pool cannot be used. `report` is called with the operation that failed and its error."""
        self.connection = connection
        self._kind = kind
        self._weights = weights
        self._settings = settings
        self._counters = counters
        self._report = report
        self._copy = ParallelCopy()
        self._patient = True
        self.leases = HeldLeases(
            settings.lease_s, lambda pages: counters.add(pages_not_read=pages), report, clock=clock
        )

    # -- looking up

    def find(self, pages: Sequence[str]) -> int:
        """The number of `pages`, hashes in hexadecimal, that the pool has, up to the first one that it lacks. They stay
        leased until `load`, or for `lease_s`. Never raises."""
        tokens = self._kind.tokens
        lease = self._match(pages, MatchOptions(counted_keys=None if tokens else 0), "looking up pages")
        if lease is None:
            self._count_lookup(not_asked=len(pages))
            return 0
        hits = lease.hits
        here = lease.local_hits
        self._count_lookup(here=here, remote=hits - here, missing=len(pages) - hits)
        self.leases.hold({page: index for index, page in enumerate(pages[:hits])}, lease)
        return hits

    def find_each(self, pages: Sequence[str]) -> tuple[list[bool], Lease | None]:
        """Whether the pool has each of `pages`, and the lease of those that it has; the caller gives it to `keep`.
        Never raises."""
        options = MatchOptions(independent=True, counted_keys=None if self._kind.tokens else 0)
        lease = self._match(pages, options, "looking up pages")
        if lease is None:
            return [False] * len(pages), None
        found = [code in _LEASED for code in lease.codes]
        # A lease may have fewer segments than its codes say, where the daemon reached a limit.
        for index in [at for at, each in enumerate(found) if each][lease.hits :]:
            found[index] = False
        return found, lease

    def keep(self, pages: Sequence[str], found: Sequence[bool], lease: Lease, wanted: range) -> None:
        """Keep those leased pages of a lookup by `find_each` whose indices are `wanted`; release the others."""
        kept: dict[str, int] = {}
        segment = 0
        for index, page in enumerate(pages):
            if not found[index]:
                continue
            if index in wanted:
                kept[page] = segment
            else:
                self.leases.release(lease, segment, segment + 1)
            segment += 1
        if kept:
            self.leases.hold(kept, lease)
        else:
            self.leases.release(lease)

    def _match(self, pages: Sequence[str], options: MatchOptions, operation: str) -> Lease | None:
        if not pages:
            return None
        try:
            pool = self.connection.get()
            if pool is None:
                return None
            deadline_s = self._settings.match_ms / 1e3 + KEY_S * len(pages)
            return pool.match(self._keys(pool, pages), options, deadline_s=deadline_s)
        except DeadlinePassed:
            self._counters.add(lookups_late=1)
        except Unreachable:
            pass
        except Exception as error:
            self._report(operation, error)
        return None

    def _count_lookup(self, here: int = 0, remote: int = 0, missing: int = 0, not_asked: int = 0) -> None:
        tokens = self._kind.tokens
        if tokens:
            self._counters.add(
                lookups=1,
                tokens_hit_here=here * tokens,
                tokens_hit_remote=remote * tokens,
                tokens_not_found=missing * tokens,
                tokens_not_asked=not_asked * tokens,
            )

    def _keys(self, pool: Pool, pages: Sequence[str]) -> list[SegmentKey]:
        group = self._kind.group
        hashes = ((group, bytes.fromhex(page)) for page in pages)
        return pool.opaque_keys(hashes, salt=self._settings.salt, weights_digest=self._weights())

    # -- loading

    def load(self, pages: Sequence[str], places: Sequence[Parts]) -> list[bool]:
        """Copy pages into the engine's memory at `places`. Returns whether each page is there; after the first that is
        not, no further one is loaded, because an engine uses only those before it. Never raises."""
        began = time.perf_counter()
        done = 0
        try:
            while done < len(pages):
                count = self._load_leased(pages[done:], places[done:])
                done += count
                if not count:
                    break
        except Unreachable:
            pass
        except Exception as error:
            self._report("loading pages", error)
        failed = done < len(pages)
        self._counters.add(
            tokens_loaded=done * self._kind.tokens,
            loads_failed=int(failed),
            load_seconds=time.perf_counter() - began,
        )
        return [index < done for index in range(len(pages))]

    def _load_leased(self, pages: Sequence[str], places: Sequence[Parts]) -> int:
        """Load the first of `pages` that one lease has: one that was kept, or a new one. Returns the number of loaded
        pages; 0: the first page is lost. Raises `Unreachable`."""
        # The weights have not changed since the lookup: a change releases the kept leases first.
        self._weights()
        held = self.leases.take(pages)
        if held is not None:
            lease, start, stop = held
        else:
            pool = self.connection.get()
            if pool is None:
                return 0
            deadline_s = self._settings.match_ms / 1e3 + KEY_S * len(pages)
            lease = pool.match(self._keys(pool, pages), MatchOptions(counted_keys=0), deadline_s=deadline_s)
            start, stop = 0, lease.hits
        try:
            return self._copy_out(lease, start, stop, places)
        finally:
            self.leases.release(lease, start, stop)

    def _copy_out(self, lease: Lease, start: int, stop: int, places: Sequence[Parts]) -> int:
        done = 0
        for first in range(start, stop, WINDOW):
            last = min(first + WINDOW, stop)
            arrays = lease.fetch(first, last)
            copies = [
                copy
                for array, parts in zip(arrays, places[first - start :], strict=False)
                for copy in out_of(array.ctypes.data, array.nbytes, parts)
            ]
            self._copy.each(move, copies, sum(array.nbytes for array in arrays))
            done += len(arrays)
            if len(arrays) < last - first:
                break
        return done

    # -- storing

    def save(self, pages: Sequence[str], places: Sequence[Parts], first: int = 0) -> list[bool]:
        """Store pages from the engine's memory. Returns whether the pool has each of them now. `first`: the index of
        the first page in its prompt, where it is known. Waits at most `write_patience_s` without progress. Never
        raises."""
        began = time.perf_counter()
        codes = b""
        try:
            pool = self.connection.get()
            if pool is not None and self._settings.save:
                codes = pool.store_all(
                    self._keys(pool, pages),
                    lambda index, slot: _into(slot, places[index]),
                    first,
                    self._settings.write_patience_s if self._patient else 0.0,
                )
        except Unreachable:
            pass
        except Exception as error:
            self._report("storing pages", error)
        new = codes.count(Code.COMMITTED)
        # A pool whose write budget is full makes the engine's thread wait once, and not for each batch: the engine's
        # memory for the pages of waiting batches cannot be used otherwise.
        self._patient = Code.first_passing(codes) < 0
        self._counters.add(
            tokens_stored=new * self._kind.tokens,
            tokens_not_stored=(len(pages) - new) * self._kind.tokens,
            save_seconds=time.perf_counter() - began,
        )
        return [code in STORED for code in codes] or [False] * len(pages)

    def close(self) -> None:
        """Release all leases, and close the connection. Idempotent."""
        self.leases.close()
        self.connection.close()


def move(copy: tuple[int, int, int]) -> None:
    """Copy bytes between two places of this process: (to, from, bytes)."""
    ctypes.memmove(*copy)


def out_of(address: int, nbytes: int, parts: Parts) -> Iterator[tuple[int, int, int]]:
    """The copies (to, from, bytes) of a segment at `address` into the parts of a page. Raises `ValueError` for parts of
    another size than the segment."""
    _check(nbytes, parts)
    for place, size in parts:
        yield place, address, size
        address += size


def _into(slot: NDArray[np.uint8], parts: Parts) -> None:
    """Fill the slot of a segment from the parts of a page. Raises `ValueError` as `out_of`."""
    _check(slot.nbytes, parts)
    address = slot.ctypes.data
    for place, size in parts:
        ctypes.memmove(address, place, size)
        address += size


def _check(nbytes: int, parts: Parts) -> None:
    """Memory beyond a page or a slot is not touched: the sizes come from the engine, and are compared before a copy."""
    total = sum(size for _, size in parts)
    if total != nbytes:
        raise ValueError(f"a page has {total} bytes; expected {nbytes}")
