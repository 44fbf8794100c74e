"""Storing segments: reserve slots, fill them in place, commit or abort."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.content import MAX_CONTENT_BYTES
from tokenlake.errors import ProtocolRefused
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake.wire.engine import MAX_CHANGED, Commit, Committed, Prepare, Prepared
from tokenlake.wire.slots import unpack_slots
from tokenlake_client.arguments import index, packed, seconds
from tokenlake_client.checksums import copy_with_checksums, shard_checksums
from tokenlake_client.link import Link
from tokenlake_client.pool_state import PoolState

log = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.002, 0.05
"""Seconds of the first pause and of the longest one between attempts to store while the write budget is used up; each
pause is twice the one before."""

Source = Callable[[int, NDArray[np.uint8]], None] | Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
"""The segments to store: a function that is called with (index into the keys, slot) to fill a slot; or one array per
key, of bytes (uint8), of shape [segment_bytes] and contiguous."""


def check_source(source: Source, keys: int, segment_bytes: int) -> None:
    """Raise `ValueError` if `source` has not one array of `segment_bytes` bytes for each of `keys` keys."""
    if callable(source):
        return
    if len(source) != keys:
        raise ValueError(f"the source has {len(source)} arrays for {keys} keys; expected one for each key")
    for at, array in enumerate(source):
        if array.dtype != np.uint8 or array.shape != (segment_bytes,):
            raise ValueError(
                f"array {at} of the source has dtype {array.dtype} and shape {array.shape}; expected uint8 and "
                f"({segment_bytes},)"
            )


def store(
    state: PoolState,
    keys: Sequence[SegmentKey],
    first: int = 0,
    patience: float = 0.0,
    request: str | None = None,
    hints: Hints | None = None,
    contents: Sequence[bytes] = (),
) -> Write:
    until = time.monotonic() + seconds("patience", patience)
    pause, name = RETRY_S, state.request_name(request)
    while True:
        link, prepared = prepare(state, keys, first, state.deadlines.store_s, name, hints, contents)
        wait = not prepared.write and Code.first_passing(prepared.codes) >= 0
        if not wait or time.monotonic() + pause > until:
            return Write(state, link, keys, prepared)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_S)


def prepare(
    state: PoolState,
    keys: Sequence[SegmentKey],
    first: int,
    deadline_s: float,
    request: str | None,
    hints: Hints | None,
    contents: Sequence[bytes],
) -> tuple[Link, Prepared]:
    """Ask the daemon for slots. Returns the link and the daemon's answer, with a code for each of `keys`: those that
    one request cannot name get SESSION_LIMIT. Raises `Unreachable`."""
    index("first", first)
    state.grants.sweep()
    name = state.request_name(request)
    log.debug("request %r: store of %d segments", name, len(keys))
    sent = that_fit(keys, contents)
    joined, told = packed(keys[:sent]), tuple(contents[:sent])
    link = state.grants.open_link
    reply = link.call(lambda number: Prepare(number, joined, first, name, hints, told), Prepared, deadline_s)
    beyond = bytes([Code.SESSION_LIMIT]) * (len(keys) - sent)
    return link, msgspec.structs.replace(reply, codes=reply.codes + beyond) if beyond else reply


def that_fit(keys: Sequence[SegmentKey], contents: Sequence[bytes]) -> int:
    """The number of segments that one request names: at most `MAX_CHANGED`, with contents of `MAX_CONTENT_BYTES`, and
    at least one."""
    left, count = MAX_CONTENT_BYTES, min(len(keys), MAX_CHANGED)
    for at, content in enumerate(contents[:count]):
        left -= len(content)
        if left < 0 and at:
            return at
    return count


class Write:
    """Slots that were reserved for segments, to be filled and committed. A `with` block commits at its end, and aborts
    when it raises.

    `slots` are writable arrays of shape [segment_bytes] in the arena, for the segments that were granted. They must not
    be written after `fill`, `commit` or `abort`. For one thread.
    """

    def __init__(self, state: PoolState, link: Link, keys: Sequence[SegmentKey], prepared: Prepared) -> None:
        """`link`: the connection over which the daemon's answer `prepared` was received. Raises the errors of mapping
        the slots' regions, after it gave the slots back."""
        self.id = WriteId(prepared.write)
        """The number by which another process of the session attaches to the write (`EngineCalls.attach_write`)."""
        self.keys = keys
        self.codes = bytearray(prepared.codes)
        """One `Code` for each key of the write; commit changes RESERVED to COMMITTED or EXPIRED."""
        self._state = state
        self._grants = state.grants
        self._link = link
        self._shards = state.layout.shards
        self._done = not self.id
        self._places = prepared.slots
        """The granted slots, packed."""
        self.slots: list[tuple[int, NDArray[np.uint8]]] = []
        """The granted slots: (index into `keys`, writable array over the slot)."""
        self._checksums: list[bytes] = []
        """For each slot that `fill` filled, the checksums of all its shards as one string of bytes."""
        if len(self.codes) != len(keys):
            link.channel.orphans.append(prepared)
            raise ProtocolRefused(f"the daemon answered for {len(self.codes)} segments, not {len(keys)}")
        if self._done:
            return
        self._grants.begin_filling(link, self.id, prepared.slots)
        try:
            self.slots += (
                (index, link.regions.get(place.region, write=True).slots[place.slot])
                for index, place in enumerate(unpack_slots(prepared.slots))
                if self.codes[index] == Code.RESERVED
            )
        except BaseException as error:
            self.slots.clear()
            self.abort()
            if isinstance(error, IndexError):
                raise ProtocolRefused("the daemon names a slot that its region does not have") from error
            raise

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the write. The write's `id` means this write only at a daemon of
        this incarnation."""
        return self._link.incarnation

    def __enter__(self) -> Write:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def fill(self, source: Source) -> None:
        """Fill all slots, and compute their checksums while the bytes are in the processor's cache. Arrays are copied
        in two threads when they are large. The slots are read-only afterwards. Raises the errors of `source`, and
        `ValueError` for arrays that do not fit the keys."""
        check_source(source, len(self.keys), self._state.layout.segment_bytes)
        if callable(source):
            self._checksums.clear()
            for index, array in self.slots:
                source(index, array)
                self._checksums.append(shard_checksums(array, self._shards))
        else:
            pairs = [(array, source[index]) for index, array in self.slots]
            self._checksums = copy_with_checksums(pairs, self._shards, self._state.parallel_copy)
        self._seal()

    def commit(self, shards: int | None = None) -> bytes:
        """Publish all slots and return the codes. `shards`: bit mask of the shards that this process filled, which are
        consecutive (default: all). Computes the checksums of slots that `fill` did not fill. Raises `Unreachable`; it
        is then unknown whether the slots were published."""
        if self._done:
            return bytes(self.codes)
        mask = (1 << self._shards) - 1 if shards is None else shards
        if len(self._checksums) < len(self.slots) or shards is not None:
            self._checksums = [shard_checksums(array, self._shards, mask) for _, array in self.slots]
        checksums = b"".join(self._checksums)
        indices = tuple(index for index, _ in self.slots)
        self._done = True
        self._seal()
        try:
            codes = self._publish(indices, mask, checksums)
        except BaseException:
            # The commit failed, and it is unknown whether the daemon got it. If it did not, the abort gives the slots
            # back; published slots are not affected.
            self._grants.drop_write(self._link, self.id, abort=True)
            raise
        finally:
            # Behind the answer: a pool that was closed leaves the daemon with its last write.
            self._grants.end_filling(self._link, self.id, self._places)
        self._grants.drop_write(self._link, self.id, abort=False)
        for at, code in zip(indices, codes, strict=True):
            self.codes[at] = code
        return bytes(self.codes)

    def leave(self) -> None:
        """End this process's part in the write after a `commit` of its shards; other processes may still commit theirs.
        Idempotent; never raises."""
        if Code.RESERVED in self.codes:
            self._grants.leave_write(self._link, self.id)

    def abort(self) -> None:
        """Abort the write: its slots are given back to the daemon. Idempotent; never raises."""
        if not self._done:
            self._done = True
            self._grants.end_filling(self._link, self.id, self._places)
            self._grants.drop_write(self._link, self.id, abort=True)

    def expire(self) -> None:
        """Abort the write, and set the codes of its slots that were not published to EXPIRED. Idempotent; never
        raises."""
        self.abort()
        self.codes[:] = self.codes.replace(bytes([Code.RESERVED]), bytes([Code.EXPIRED]))

    def _seal(self) -> None:
        for _, array in self.slots:
            array.flags.writeable = False

    def _publish(self, indices: tuple[int, ...], mask: int, checksums: bytes) -> bytes:
        link = self._grants.link
        if self._link.life != link.life:
            return bytes([Code.EXPIRED]) * len(indices)
        reply = link.call(
            lambda number: Commit(number, self.id, indices, mask, checksums), Committed, link.deadlines.store_s
        )
        if len(reply.codes) != len(indices):
            raise ProtocolRefused(f"the daemon answered for {len(reply.codes)} segments, not {len(indices)}")
        return reply.codes


class Reservation:
    """Slots that other processes of the session fill: each process attaches, commits its shards and leaves. The slots
    stay reserved until all shards are committed, or until all processes that hold them, this one included, have given
    them back."""

    def __init__(self, state: PoolState, link: Link, prepared: Prepared) -> None:
        """`link`: the connection over which the daemon's answer `prepared` was received. Raises `Unreachable`."""
        self.id = WriteId(prepared.write)
        """The number by which other processes of the session attach to the write (`EngineCalls.attach_write`); 0 when
        no slot was granted."""
        self.codes = prepared.codes
        """One `Code` for each key for which slots were requested."""
        self._grants = state.grants
        self._link = link
        self._grants.hold_write(link, self.id)

    @property
    def incarnation(self) -> int:
        """The incarnation of the daemon that granted the slots. The reservation's `id` is valid only at a daemon of
        this incarnation."""
        return self._link.incarnation

    def release(self) -> None:
        """End this process's hold of the reserved slots. Idempotent; never raises."""
        if self.id:
            self._grants.drop_write(self._link, self.id, abort=True)
            self.id = WriteId(0)
