"""What is in a cold tier, and whether its objects are sound: for the commands of an operator, which need no daemon."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tokenlake_server.cold import sealed
from tokenlake_server.cold.base import Missing, Unfit
from tokenlake_server.cold.catalogue import Catalogue
from tokenlake_server.cold.index import DAY, Index
from tokenlake_server.cold.names import ColdTenant, path_of, short_of
from tokenlake_server.cold.places import Place
from tokenlake_server.cold.sealed import HEAD_BYTES, object_bytes, read_head

AGES = (("the last hour", 60), ("the last day", DAY), ("the last week", 7 * DAY))
OTHER = "another tenant"
"""Stands for the tenants whose secret is not known here."""


class Group(NamedTuple):
    """The objects of one tenant and size."""

    tenant: str
    slot_bytes: int
    objects: int
    nbytes: int


def groups(index: Index, tenants: dict[str, ColdTenant]) -> list[Group]:
    """The objects that the index names, by tenant and size of a segment."""
    names = {tenant.tag: name for name, tenant in tenants.items()}
    counts = np.zeros(1 << 16, np.int64)
    for part in index.objects():
        counts += np.bincount(part.kinds, minlength=1 << 16)
    found: dict[tuple[str, int], int] = {}
    for kind, count in zip(index.kinds.all, counts.tolist(), strict=False):
        at = (names.get(kind.tag, OTHER), kind.slot_bytes)
        found[at] = found.get(at, 0) + count
    return [Group(*at, count, count * object_bytes(at[1])) for at, count in sorted(found.items()) if count]


def ages(catalogue: Catalogue) -> Iterator[tuple[str, int]]:
    """Yields how many objects were used last within each of some times."""
    now = catalogue.clock.minute()
    minutes = [part.minutes for part in catalogue.index.objects()]
    every = np.concatenate(minutes).astype(np.int64) if minutes else np.zeros(0, np.int64)
    newer = 0
    for text, span in AGES:
        count = int((every >= now - span).sum())
        yield text, count - newer
        newer = count
    yield "before", len(every) - newer


class Checked(NamedTuple):
    """The result of a verification."""

    sound: int
    unknown: int
    """Objects of tenants whose secret is not known here: only their heads and sizes were looked at."""
    missing: int
    damaged: list[tuple[str, str]]
    """(path, what is wrong)."""


def verified(place: Place, index: Index, tenants: Sequence[ColdTenant], most: int | None) -> Checked:
    """Verify the objects that the index names, or `most` of them by chance. Raises OSError."""
    shorts = [short for part in index.objects() for short in part.shorts.tolist()]
    if most is not None and most < len(shorts):
        shorts = random.sample(shorts, most)
    secrets = {tenant.tag: tenant for tenant in tenants}
    sound = unknown = missing = 0
    damaged: list[tuple[str, str]] = []
    for short in shorts:
        try:
            if _verify(place, short, secrets):
                sound += 1
            else:
                unknown += 1
        except Missing:
            missing += 1
        except Unfit as error:
            damaged.append((path_of(short), str(error)))
    return Checked(sound, unknown, missing, damaged)


def _verify(place: Place, short: int, tenants: dict[int, ColdTenant]) -> bool:
    """Verify one object. False where its tenant is not known. Raises `Missing`, `Unfit` and OSError."""
    with contextlib.closing(place.read(path_of(short))) as reader:
        block = memoryview(bytearray(min(HEAD_BYTES, reader.nbytes)))
        reader.read(block)
        head = read_head(block)
        if short_of(head.name) != short:
            raise Unfit("it is another object than its path says")
        if object_bytes(head.slot_bytes) != reader.nbytes:
            raise Unfit(f"it has {reader.nbytes} bytes; {object_bytes(head.slot_bytes)} expected")
    tenant = tenants.get(head.tag)
    if tenant is None:
        return False
    with contextlib.closing(place.read(path_of(short))) as reader:
        segment = memoryview(bytearray(head.slot_bytes))
        sealed.read(reader, tenant, head.name, segment, head.shards, sealed.room_for_piece(), _Own())
    return True


class _Own:
    """The memory is the reader's own."""

    def touching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
