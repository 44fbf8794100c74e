"""The prompts that simulated engines read and store."""

from __future__ import annotations

import hashlib

from tokenlake.identity import SegmentKey


def prompt(name: str, segments: int) -> list[SegmentKey]:
    """Keys of a prompt, spread over the ring as real ones are."""
    digests = (hashlib.blake2b(f"{name}/{index}".encode(), digest_size=32) for index in range(segments))
    return [SegmentKey(digest.digest()) for digest in digests]


_SYSTEM = prompt("system", 3)
PROMPTS = [_SYSTEM + prompt("first", 4), _SYSTEM + prompt("second", 4), prompt("other", 7), prompt("long", 7)]
"""Two share a prefix."""
