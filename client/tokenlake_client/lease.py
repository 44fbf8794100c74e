"""A lease, and the arrays over its segments."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.wire import Code
from tokenlake.wire.engine import (
    HERE,
    MAX_CHANGED,
    MAX_FETCHED,
    MAX_KEYS,
    Corrupt,
    EngineReply,
    Fetch,
    Fetched,
    Hint,
    Locate,
    Located,
    Matched,
)
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import slot_array
from tokenlake_client.arguments import seconds
from tokenlake_client.channel import Pending
from tokenlake_client.checksums import shard_checksums
from tokenlake_client.grants import LeaseHold
from tokenlake_client.link import Link
from tokenlake_client.pool_state import PoolState
from tokenlake_client.regions import Mapping, Window

COPY_BYTES = 4 << 20
"""Bytes of each piece of a copy that two threads share."""
MOST_TOKENS = (1 << 32) - 1
LEAST_S = 0.001
"""Least deadline in seconds of a part of a fetch."""
_LOCAL = bytes([Code.LOCAL])
_LEASED = bytes([Code.LOCAL, Code.REMOTE])


class _Pin:
    """Ends the pins of the segments `start` to `stop` of a lease when it is collected. The arrays of one `fetch`, and
    all views of them, refer to one such object, so that the pins end with the last of these views."""

    __slots__ = ("_lease", "_start", "_stop")

    def __init__(self, lease: Lease, start: int, stop: int) -> None:
        self._lease = lease
        self._start = start
        self._stop = stop

    def __del__(self) -> None:
        self._lease._unpin(self._start, self._stop)


class LeaseParts(NamedTuple):
    """Some parts of a lease, to which another process attaches alone (`EngineCalls.attach`)."""

    ids: tuple[LeaseId, ...]
    hits: int
    """The number of segments of these parts."""
    within: dict[int, int]
    """For segments of the lease, the index of each in these parts."""


class Lease:
    """A promise of the daemon not to evict the segments of `keys`. The pool's heartbeats keep it alive.

    The daemon grants leases of at most `MAX_KEYS` segments, the parts of this lease. Its segments are counted through
    all parts::

        part     |--- 0 ---|--- 1 ----|- 2 -|
        segments  0 ............... hits - 1

    It ends when its `with` block is left, or by `release`. The arrays of one `fetch` keep all their segments leased
    beyond that, for as long as any view of any of these arrays lives. The tokens of the segments that were read
    (`fetch`, `copy_into`, `used`) then count as supplied by the pool, and the others as missed. Thread-safe.
    """

    def __init__(
        self,
        state: PoolState,
        link: Link,
        keys: Sequence[SegmentKey],
        parts: Sequence[Matched],
        request: str = "",
        *,
        independent: bool = False,
    ) -> None:
        """`link`: the connection over which the daemon's answers `parts` were received, at least one, each for the next
        `MAX_KEYS` of `keys`. `independent`: a part leases each of its keys that has the code LOCAL or REMOTE; otherwise
        its first ones, and all parts but the last lease all their keys. Raises `Unreachable`."""
        self.request = request
        """The name of the request in the logs of the nodes; empty for a lease that another process made."""
        hits = sum(part.hits for part in parts)
        codes = b"".join(part.codes for part in parts)
        self.hits = hits
        """Number of leased segments."""
        self.codes = codes + bytes([Code.MISSING]) * (len(keys) - len(codes))
        """One `Code` for each segment key of the match that made the lease. Keys behind the first `MAX_KEYS` that hold
        a missing one are MISSING, unless the keys are independent; the daemon was not asked for them."""
        if independent:
            leased = _leased(parts, len(keys))
            self.keys: Sequence[SegmentKey] = [keys[index] for index in leased]
            codes = bytes([codes[index] for index in leased])
        else:
            self.keys = keys[:hits]
        self.places = slot_array(bytearray().join(part.slots for part in parts))
        """The place of each leased segment in this node's arena: `region`, `slot`, `generation`; zeros where the
        segment is not on this node."""
        ends = itertools.accumulate(part.hits for part in parts)
        holds = [
            LeaseHold(LeaseId(part.lease), link, self.places[end - part.hits : end])
            for part, end in zip(parts, ends, strict=True)
        ]
        parts = [part for part in parts if part.hits] or parts[:1]
        self.ids = tuple(LeaseId(part.lease) for part in parts)
        """The numbers of the lease's parts, by which another process of the session attaches to it
        (`EngineCalls.attach`)."""
        self.link = link
        self._state = state
        self._grants = state.grants
        # The codes, slots and checksums in the daemon's answer stay packed as they were received: most callers need
        # only some of them.
        self._item_codes = bytearray(codes[:hits])
        self._checksums = bytearray().join(part.checksums for part in parts)
        """The checksums of the leased segments, in the order of `shard_checksums`; empty unless the pool verifies its
        reads."""
        self._all = holds
        """The hold of each part."""
        self._holds = [hold for hold in holds if len(hold.pins)]
        """The holds of the parts with segments."""
        self._ends = list(itertools.accumulate(len(hold.pins) for hold in self._holds))
        """The end of each of these parts: the index of the segment after its last one."""
        self._empty: list[LeaseHold] = []
        """The holds of the parts without segments that are not released."""
        with self._grants.lock:
            for hold in holds:
                self._grants.hold_lease(hold)
                if not len(hold.pins):
                    self._empty.append(hold)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Parts without segments hold nothing, and many callers release only a lease with hits.
        for hold in getattr(self, "_empty", ()):
            self._grants.note_collected(hold)

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the lease. The lease's `ids` mean this lease only at a daemon of
        this incarnation."""
        return self.link.incarnation

    @property
    def local_hits(self) -> int:
        """Number of this lease's segments that were in this node's arena when the lease was granted or last fetched."""
        return self._item_codes.count(Code.LOCAL)

    @property
    def unreleased(self) -> int:
        """Number of leased segments, from the first on, that are not released."""
        count = 0
        for hold in self._holds:
            left = hold.unreleased
            count += len(left) if left.all() else int(left.argmin())
            if not left.all():
                break
        return count

    def code(self, index: int) -> Code:
        """The latest state of the leased segment `index` that this process knows: LOCAL, REMOTE, or why the last fetch
        of it failed. A segment with a wrong checksum, in a pool that verifies, is LOCAL."""
        return Code(self._item_codes[index])

    def nodes(self) -> list[str]:
        """The name of the node that has each leased segment; fewer than `hits` names where a segment was lost. Raises
        `Unreachable`."""
        return self.sources()[0]

    def sources(self) -> tuple[list[str], list[float]]:
        """The name of the node that has each leased segment, as `nodes`, and the expected seconds for each until that
        node has read it from its disk; 0 for a segment in memory. Raises `Unreachable`."""
        pending = self.begin_nodes()
        try:
            return pending.wait(self.link.deadlines.call_s), pending.disk_s
        except BaseException:
            pending.cancel()
            raise

    def parts_of(self, segments: Collection[int]) -> LeaseParts:
        """The parts that hold these of the leased segments. A process that attaches needs them alone, and would not
        find the segments behind a part all of whose segments are released."""
        by_part: dict[int, list[int]] = {}
        for segment in segments:
            by_part.setdefault(bisect.bisect_right(self._ends, segment), []).append(segment)
        within: dict[int, int] = {}
        ids, hits = [], 0
        for part in sorted(by_part):
            begin = self._ends[part - 1] if part else 0
            ids.append(self._holds[part].id)
            within.update((segment, hits + segment - begin) for segment in by_part[part])
            hits += self._ends[part] - begin
        return LeaseParts(tuple(ids), hits, within)

    def begin_nodes(self) -> PendingNodes:
        """Ask the daemon which nodes have the leased segments, without waiting: `PendingNodes.poll` returns the answer.
        Raises `Unreachable`."""
        return PendingNodes(self._grants.current(self.link), [hold.id for hold in self._holds])

    def fetch(
        self, start: int = 0, stop: int | None = None, deadline_s: float | None = None, at_most_s: float = 0.0
    ) -> list[NDArray[np.uint8]]:
        """Read-only arrays of shape [segment_bytes] over the segments `start` to `stop` (default: `hits`), one each.
        The list ends before the first segment that was lost or, in a pool that verifies, does not match its checksum;
        a further call may begin behind it. Segments at other nodes are transferred to this node first.

        `deadline_s`: the deadline of the transfer (default: `Deadlines.fetch_s`); 0: the daemon predicts one.
        `at_most_s`: limit of that deadline, such as half of the time in which the engine computes the segments itself;
        0: none. Raises `Unreachable`.
        """
        stop = self.hits if stop is None else min(stop, self.hits)
        stop = self._make_local(start, stop, deadline_s, at_most_s)
        arrays = self._map(start, stop) if start < stop else []
        if self._state.verify:
            for at, array in enumerate(arrays):
                if not self._matches_checksum(start + at, array):
                    arrays = arrays[:at]
                    break
        self.used(start, start + len(arrays))
        return arrays

    def copy_into(self, arrays: Sequence[NDArray[np.uint8]], start: int = 0, deadline_s: float | None = None) -> int:
        """Copy the segments from `start` on into `arrays`, each writable and of shape [segment_bytes], in two threads
        when the copy is large. Returns the number of arrays, from the first on, that hold their segment: fewer than all
        where the lease has fewer segments, or where `fetch` would return fewer. The contents of the other arrays are
        undefined.

        Segments at other nodes are transferred to this node first, as by `fetch`. Raises `Unreachable`.
        """
        stop = self._make_local(start, min(start + len(arrays), self.hits), deadline_s)
        if start >= stop:
            return 0
        places = self.places[start:stop].copy()
        mappings = self._mappings(places)
        slots = [mappings[region].slots[slot] for region, slot in zip(*_columns(places), strict=True)]
        parts = [
            (array[at : at + COPY_BYTES], slot[at : at + COPY_BYTES])
            for array, slot in zip(arrays, slots, strict=False)
            for at in range(0, len(slot), COPY_BYTES)
        ]
        self._state.parallel_copy.each(_copy_part, parts, sum(slot.nbytes for slot in slots))
        # If the generation of a slot has changed, the slot was reused, and may have been overwritten during the copy.
        intact = np.empty(len(slots), np.bool_)
        for region, mapping in mappings.items():
            rows = places["region"] == region
            intact[rows] = mapping.generations[places["slot"][rows]] == places["generation"][rows]
        count = len(slots) if intact.all() else int(intact.argmin())
        if self._state.verify:
            count = next((at for at in range(count) if not self._matches_checksum(start + at, arrays[at])), count)
        self.used(start, start + count)
        return count

    def used(self, start: int, stop: int) -> None:
        """Record that the leased segments `start` to `stop` were used although none of them was handed out: queries
        attended to them where they lie, or the engine needs none of their bytes for these tokens. They count as
        read."""
        with self._grants.lock:
            for hold, first, last in self._spans(start, stop):
                hold.read[first:last] = True

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        """Record which tokens of the prompt, whose first token is that of the first key, the engine takes from the
        pool: its own cache has those before `start`, whether the pool has them or not, and it computes those from
        `stop` on. Only tokens between count as supplied, also of a segment that it reads whole. `saved_s`: the seconds
        in which it would compute them; 0: unknown. A later call replaces an earlier one; call it before the release."""
        size = self._state.layout.segment_tokens * MAX_KEYS
        for number, hold in enumerate(self._all):
            first, last = (max(0, min(at, MOST_TOKENS) - number * size) for at in (start, max(start, stop)))
            share = (min(last, size) - min(first, size)) / max(1, stop - start)
            hold.took = first, last, saved_s * share

    def hint(self, hints: Hints) -> None:
        """Send hints, as `Pool.hint` does, about all segments of the lease; later reads with the lease carry them too,
        and only these where another process made the lease. Never waits, never raises."""
        with contextlib.suppress(TokenLakeError):
            channel = self._grants.current(self.link).channel
            for hold, end in zip(self._holds, self._ends, strict=True):
                for start in range(end - len(hold.pins), end, MAX_CHANGED):
                    channel.tell(Hint(b"".join(self.keys[start : min(end, start + MAX_CHANGED)]), hints, hold.id))

    def release(self, start: int = 0, stop: int | None = None, *, counted: bool = True) -> None:
        """Release the leased segments `start` to `stop` (default: all). `counted`: False if the engine matches the same
        tokens again, so that they do not count twice. Idempotent; never raises."""
        stop = self.hits if stop is None else stop
        if not counted:
            for hold in self._all:
                hold.counted = False
        for hold, first, last in self._spans(start, stop):
            if hold.unreleased[first:last].any():
                self._grants.release(hold, first, last)
        while start <= 0 and stop >= self.hits and self._empty:
            self._grants.release(self._empty.pop(), 0, 0)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[LeaseHold, int, int]]:
        """The segments `start` to `stop` by the part of the lease that they belong to: (part, first, last), where the
        indices count from the part's first segment."""
        start = max(start, 0)
        for number in range(bisect.bisect_right(self._ends, start), len(self._holds)):
            hold, end = self._holds[number], self._ends[number]
            begin = end - len(hold.pins)
            if stop <= begin:
                return
            yield hold, max(start - begin, 0), min(stop, end) - begin

    def _make_local(self, start: int, stop: int, deadline_s: float | None, at_most_s: float = 0.0) -> int:
        """Transfer the segments `start` to `stop` to this node. Returns the index of the first one that is not local
        afterwards, or `stop`."""
        limit_s = self.link.deadlines.fetch_s if deadline_s is None else seconds("deadline_s", deadline_s)
        seconds("at_most_s", at_most_s)
        began = time.monotonic()
        at = start
        while at < stop:
            # A fetch names segments of one part of the lease.
            end = min(stop, at + MAX_FETCHED, self._ends[bisect.bisect_right(self._ends, at)])
            at, first = end, at
            if self._item_codes.count(Code.LOCAL, first, end) == end - first:
                continue
            # 0 stands for a deadline that the daemon predicts, so that a deadline that has passed is not 0.
            passed_s = time.monotonic() - began
            left_s, most_left_s = (max(LEAST_S, each - passed_s) if each else 0.0 for each in (limit_s, at_most_s))
            link, reply = self._fetch(first, end, left_s, most_left_s)
            with self._grants.lock:
                # A daemon that has the memory of the one before was not told of these slots if it has taken over
                # meanwhile: it may reuse them.
                self._grants.check_over(link)
                self._record(first, end, reply.codes, reply.slots, reply.checksums)
            if self._item_codes.count(Code.LOCAL, first, end) < end - first:
                break
        from_first_missing = self._item_codes[start:stop].lstrip(_LOCAL)
        return stop - len(from_first_missing)

    def _fetch(self, start: int, stop: int, limit_s: float, at_most_s: float) -> tuple[Link, Fetched]:
        self._grants.sweep()
        link = self._grants.current(self.link)
        verify = self._state.verify
        ((hold, first, last),) = self._spans(start, stop)
        pending = link.channel.begin(
            lambda number: Fetch(number, hold.id, first, last, limit_s, verify, self.request, at_most_s)
        )
        if limit_s or at_most_s:
            wait_s = min(limit_s or at_most_s, at_most_s or limit_s) + link.deadlines.grace_s
            return link, link.expect(link.channel.wait(pending, wait_s), Fetched)
        return link, link.expect(link.wait_while_alive(pending), Fetched)

    def _record(self, start: int, stop: int, codes: bytes, slots: bytes, checksums: bytes) -> None:
        if len(codes) > stop - start:
            raise ProtocolRefused(f"the daemon sent codes of {len(codes)} segments; {stop - start} were asked for")
        if self._state.verify and len(checksums) != CHECKSUM_BYTES * self._state.layout.shards * len(codes):
            raise ProtocolRefused(f"the daemon sent {len(checksums)} bytes of checksums for {len(codes)} segments")
        # For a lease that has ended the daemon sends fewer codes than there are segments: the segments without a code
        # are lost.
        end = min(stop, start + len(codes))
        size = CHECKSUM_BYTES * self._state.layout.shards
        self._item_codes[start:stop] = codes[: end - start] + bytes([Code.LOST]) * (stop - end)
        self.places[start:end] = slot_array(slots)
        if self._state.verify:
            self._checksums[start * size : end * size] = checksums

    def _matches_checksum(self, index: int, segment: NDArray[np.uint8]) -> bool:
        shards = self._state.layout.shards
        size = CHECKSUM_BYTES * shards
        if shard_checksums(segment, shards) == self._checksums[index * size : (index + 1) * size]:
            return True
        self._state.count_corrupt()
        # Report the corrupt copy: the daemon checks it too and drops it. Engines that do not verify would otherwise go
        # on reading it.
        with contextlib.suppress(TokenLakeError):
            for hold, first, _ in self._spans(index, index + 1):
                self._grants.current(self.link).channel.tell(Corrupt(hold.id, first))
        return False

    def _mappings(self, places: NDArray[np.void]) -> dict[int, Mapping]:
        """For each region number in `places`, this process's mapping of that region of the arena. Raises
        `Unreachable`."""
        regions = self._grants.current(self.link).regions
        mappings = {region: regions.get(region) for region in dict.fromkeys(places["region"].tolist())}
        slots = {region: mapping.shape.slots for region, mapping in mappings.items()}
        # The first comparison is much faster, and enough unless a region is smaller than others.
        if places["slot"].max(initial=0) >= min(slots.values(), default=1) and any(
            slot >= slots[region] for region, slot in zip(*_columns(places), strict=True)
        ):
            raise ProtocolRefused("the daemon names a slot that its region does not have")
        return mappings

    def _map(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        """Arrays over the leased segments `start` to `stop`, or to the first released one, in this node's arena. The
        segments stay leased while the arrays live."""
        places = self.places[start:stop].copy()
        mappings = self._mappings(places)
        with self._grants.lock:
            self._grants.current(self.link)
            stop = self._pin(start, stop)
        pin = _Pin(self, start, stop)
        windows = {
            region: np.asarray(Window(mapping, pin, functools.partial(_slots_in, region, places)))
            for region, mapping in mappings.items()
        }
        regions, slots = _columns(places[: stop - start])
        return [windows[region][slot] for region, slot in zip(regions, slots, strict=True)]

    def _pin(self, start: int, stop: int) -> int:
        """Pin the segments `start` to `stop`, or to the first released one. Returns where the pinned segments end. The
        caller holds the lock of `_grants`."""
        end = start
        for hold, first, last in self._spans(start, stop):
            pinned = hold.pin(first, last)
            if pinned > first:
                self._grants.count_pin()
            end += pinned - first
            if pinned < last:
                break
        return end

    def _unpin(self, start: int, stop: int) -> None:
        # The garbage collector may call this in the middle of any code, so it must take no lock.
        for hold, first, last in self._spans(start, stop):
            self._grants.note_unpin(hold, first, last)


def _leased(parts: Sequence[Matched], keys: int) -> list[int]:
    """The index of each leased key among the `keys` of a match of independent keys, to which `parts` are the answers.
    Raises `ProtocolRefused` where a part has another number of codes than its request has keys, or leases more keys
    than its codes say."""
    leased: list[int] = []
    for number, part in enumerate(parts):
        asked = min(MAX_KEYS, keys - number * MAX_KEYS)
        if len(part.codes) != asked:
            raise ProtocolRefused(f"the daemon sent codes of {len(part.codes)} segments; {asked} were asked for")
        found = [at for at, code in enumerate(part.codes) if code in _LEASED]
        if len(found) < part.hits:
            raise ProtocolRefused(f"the daemon leased {part.hits} segments; its codes say {len(found)}")
        leased += [number * MAX_KEYS + at for at in found[: part.hits]]
    return leased


def _slots_in(region: int, places: NDArray[np.void]) -> list[int]:
    """The slots of `places` in one region."""
    slots: list[int] = places["slot"][places["region"] == region].tolist()
    return slots


def _columns(places: NDArray[np.void]) -> tuple[list[int], list[int]]:
    """The region numbers and the slot numbers of `places`, as two lists."""
    return places["region"].tolist(), places["slot"].tolist()


def _node_names(link: Link, placed: Located) -> list[str]:
    if any(HERE != owner >= len(placed.nodes) for owner in placed.owners):
        raise ProtocolRefused("the daemon names an owner that is not in its list of nodes")
    return [link.node if owner == HERE else placed.nodes[owner] for owner in placed.owners]


def _disk_seconds(placed: Located) -> list[float]:
    """The part of each segment in the seconds that its node needs to read from its disk."""
    if not placed.disk_s:
        return [0.0] * len(placed.owners)
    counts = Counter(placed.owners)
    parts = {owner: seconds / max(1, counts[owner]) for owner, seconds in enumerate(placed.disk_s)}
    return [parts.get(owner, 0.0) for owner in placed.owners]


def _copy_part(part: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    np.copyto(*part)


class PendingNodes:
    """A request to the daemon for the nodes of a lease's segments, whose answer is awaited. For one thread."""

    def __init__(self, link: Link, parts: Sequence[int]) -> None:
        """`parts`: the numbers of the lease's parts."""
        self._link = link
        self._pending = [self._begin(part) for part in parts]
        self._names: list[str] = []
        self.disk_s: list[float] = []
        """Once the reply has arrived: for each segment, its part of the seconds until its node has read the segments
        of the lease that are on its disk; 0 where none is."""

    def _begin(self, part: int) -> Pending:
        return self._link.channel.begin(lambda number: Locate(number, part))

    def poll(self) -> list[str] | None:
        """The nodes of the lease's segments once the daemon's reply has arrived, None before. Never waits. Raises
        `Unreachable`."""
        while self._pending:
            reply = self._link.channel.poll(self._pending[0])
            if reply is None:
                return None
            self._take(reply)
        return self._names

    def wait(self, deadline_s: float) -> list[str]:
        """The nodes of the lease's segments, awaited for at most `deadline_s`. Raises `Unreachable`."""
        until = time.monotonic() + deadline_s
        while self._pending:
            self._take(self._link.wait(self._pending[0], max(0.0, until - time.monotonic())))
        return self._names

    def cancel(self) -> None:
        """Give up the request for the nodes of a lease's segments: the caller does not need the answer any more."""
        for pending in self._pending:
            self._link.channel.drop(pending)

    def _take(self, reply: EngineReply) -> None:
        placed = self._link.expect(reply, Located)
        self._names += _node_names(self._link, placed)
        self.disk_s += _disk_seconds(placed)
        del self._pending[0]
