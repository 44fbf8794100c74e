"""Carries out `CheckSlot`: verifies a copy that a reader reported as corrupt, in a thread."""

from __future__ import annotations

import logging

import xxhash

from tokenlake.core import events
from tokenlake.core.instructions import CheckSlot
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import unpack_slots
from tokenlake_server.engines.arena import Arena
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.started_threads import started_threads

log = logging.getLogger(__name__)


class SlotChecker:
    """Checks in one thread of its own; more are not needed, because the rules issue one `CheckSlot` at a time."""

    def __init__(self, arena: Arena, driver: Driver) -> None:
        self._arena = arena
        self._driver = driver
        self._thread = started_threads(1, "check")
        driver.carry_out(CheckSlot, self._start)

    def _start(self, instruction: CheckSlot) -> None:
        self._thread.submit(self._run, instruction)

    def _run(self, instruction: CheckSlot) -> None:
        """Check the bytes of one slot, in the thread. Always posts `SlotChecked`: a check that fails finds no wrong
        bytes."""
        right = True
        try:
            right = self._is_right(instruction)
        except Exception:
            log.exception("the check %d of a slot that a reader reported as corrupt failed", instruction.check)
        self._driver.post(events.SlotChecked(instruction.check, right))

    def _is_right(self, instruction: CheckSlot) -> bool:
        (slot,) = self._arena.slots(unpack_slots(instruction.slot), instruction.slot_bytes)
        shards = len(instruction.checksums) // CHECKSUM_BYTES
        size = len(slot) // shards
        digests = (xxhash.xxh3_64_intdigest(slot[at : at + size]) for at in range(0, size * shards, size))
        return b"".join(each.to_bytes(CHECKSUM_BYTES, "little") for each in digests) == instruction.checksums

    def close(self) -> None:
        """Wait for the check of a slot that is in progress."""
        self._thread.shutdown(wait=True, cancel_futures=True)
