"""The time that a match may take: one rule for clients and daemons.

A lookup takes longer for a long prompt: each of its segments is looked up at its directory node and at its owner. So
does computing it, by 50 times as much and more.
"""

from __future__ import annotations

SECONDS_PER_SEGMENT = 20e-6
"""Seconds that each segment adds to the deadline of a match: four times what looking it up at another node takes."""


def match_deadline_s(base_s: float, segments: int) -> float:
    """The deadline, in seconds, of lookups of so many segments. `base_s`: the part that does not depend on their
    number."""
    return base_s + SECONDS_PER_SEGMENT * segments
