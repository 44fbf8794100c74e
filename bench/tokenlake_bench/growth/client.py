"""A client process of `bench growth`, which makes matches at its daemon when the benchmark asks for them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Final

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake_bench.transfer.windows import keys_of
from tokenlake_bench.transfer.worker import serve
from tokenlake_client import Pool

PROMPT_KEYS: Final = 1024
"""Number of segments of one stored prompt, which is also the number of keys of the longest match."""
DEADLINE_S: Final = 5.0
LAYOUT: Final = Layout(
    model_id="bench-growth",
    weights_digest="00",
    dtype="float16",
    layers=1,
    kv_heads=8,
    key_dim=8,
    value_dim=8,
    position="none",
    segment_tokens=16,
)
"""Layout of the stored segments. With 8 shards a segment has as many checksums as a large one, but only 4 KiB, so that
100,000 segments fit into memory."""


def held_keys(number: int, count: int) -> list[SegmentKey]:
    """Keys of the first `count` segments of the stored prompt with this number."""
    return keys_of("held", number, count)


class Matching:
    """Makes matches of keys that the daemon holds, from randomly drawn prompts, and measures them."""

    def __init__(self, pool: Pool, segments: int, seed: int) -> None:
        """`segments`: number of segments that the daemon has, which are whole prompts of `PROMPT_KEYS` segments, or a
        part of one."""
        self._pool = pool
        self._draw = random.Random(seed)
        self._prompts = [
            held_keys(number, min(PROMPT_KEYS, segments)) for number in range(max(1, segments // PROMPT_KEYS))
        ]

    def run(self, keys: int, calls: int) -> list[float]:
        """Make `calls` matches of `keys` consecutive keys each, and release each lease. Returns the seconds of each
        match. Raises TokenLakeError unless all keys are found."""
        return [self._once(self._some(keys)) for _ in range(calls)]

    def _some(self, count: int) -> Sequence[SegmentKey]:
        prompt = self._draw.choice(self._prompts)
        start = self._draw.randrange(len(prompt) - count + 1)
        return prompt[start : start + count]

    def _once(self, keys: Sequence[SegmentKey]) -> float:
        began = time.perf_counter()
        lease = self._pool.match(keys, deadline_s=DEADLINE_S)
        took = time.perf_counter() - began
        lease.release()
        if lease.hits < len(keys):
            raise TokenLakeError(f"{lease.hits} of {len(keys)} segments found")
        return took


def main(socket: str, segments: str, seed: str) -> None:
    """The main function of the client process: connect to the daemon and serve calls of the benchmark."""
    with Pool.connect(socket, LAYOUT) as pool:
        matching = Matching(pool, int(segments), int(seed))
        serve({"run": matching.run})


if __name__ == "__main__":
    main(*sys.argv[1:])
