"""The state of the cold tier, and its gauges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tokenlake.metrics import Level, Metric


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"tokenlake_cold_{name}", help, *labels, kind="gauge")


SERVING = _gauge("serving", "1 while the cold tier is used, 0 while it is set aside; absent without the setting `cold`")
WRITABLE = _gauge(
    "writable",
    "1 while this node writes to the cold tier; 0 while it is set aside or full, and until other nodes have heard of "
    "this one",
)
OBJECTS = _gauge("objects", "Objects in the cold tier, of all nodes, as the index of this node names them")
USED = _gauge("used_bytes", "Bytes of these objects")
SIZE = _gauge("size_bytes", "The setting `cold_size`")
ENTRIES = _gauge("index_entries", "Entries of the index in memory, removals included: 14 bytes each in tables")
AGE = _gauge("index_age_seconds", "Time since this node read what other nodes did in the cold tier")
LATENCY = _gauge("latency_seconds", "Time from the begin of a read from the cold tier to its first byte, a moving mean")
RATE = _gauge(
    "rate_bytes_per_second", "Bytes per second of all reads or writes of this node together, a moving mean", "kind"
)
QUEUE = _gauge("queued_segments", "Segments that wait to be read from the cold tier or written to it")
ERRORS = _gauge(
    "errors",
    "Operations of this node on the cold tier since the start that failed (`read`, `write`), objects that were not "
    "what they should be (`mismatch`), and objects that the index named and that were not there (`vanished`)",
    "kind",
)
REFUSED = _gauge(
    "unplaced_segments",
    "Segments that this node did not write to the cold tier since the start, for want of room in it",
)
EXPIRED = _gauge("expired_objects", "Objects that this node let expire since it opened the cold tier")
SCANNED = _gauge(
    "scanned_objects", "Objects without an entry in the index that this node found since it opened the cold tier"
)


class ColdState(NamedTuple):
    """The state of the tier, for the metrics page and operators."""

    place: str
    serving: bool
    writable: bool
    """The node writes; not for the first seconds, until other nodes have heard of it."""
    problem: str
    """Why the place is set aside, or what is wrong while it serves; empty if nothing, and before the first opening."""
    objects: int
    nbytes: int
    size: int
    index_entries: int
    index_age_s: float
    """Seconds since the journals of other writers were read; 0 while the place is set aside."""
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    queue: int
    read_errors: int
    write_errors: int
    mismatches: int
    """Objects that were not what they should be."""
    vanished: int
    """Objects that the index named and that were not there."""
    refused: int
    """Segments that were not written for want of room."""
    expired: int
    scanned: int
    """Objects that a scan found without an entry."""


def cold_gauges(state: ColdState) -> Iterator[Level]:
    """The gauges of the cold tier."""
    yield from (
        Level(SERVING, (), state.serving),
        Level(WRITABLE, (), state.writable),
        Level(OBJECTS, (), state.objects),
        Level(USED, (), state.nbytes),
        Level(SIZE, (), state.size),
        Level(ENTRIES, (), state.index_entries),
        Level(AGE, (), state.index_age_s),
        Level(LATENCY, (), state.latency_s),
        Level(RATE, ("read",), state.read_bytes_per_s),
        Level(RATE, ("write",), state.write_bytes_per_s),
        Level(QUEUE, (), state.queue),
        Level(ERRORS, ("read",), state.read_errors),
        Level(ERRORS, ("write",), state.write_errors),
        Level(ERRORS, ("mismatch",), state.mismatches),
        Level(ERRORS, ("vanished",), state.vanished),
        Level(REFUSED, (), state.refused),
        Level(EXPIRED, (), state.expired),
        Level(SCANNED, (), state.scanned),
    )
