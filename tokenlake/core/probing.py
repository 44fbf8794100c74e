"""Where there are many nodes, a match first asks about some of its keys.

Few segments of a prompt have a candidate in common there, so to ask about all at once is two lookups for each, most of
them for nothing: behind the first one that nobody has, no other is of use. So the first round asks about the first
missing key, the second, the fourth, the eighth, and so on: it bounds the prefix to within twice its length. What lies
between is asked about in a second round::

    missing keys     0 1 2 3 4 5 6 7 8 9 ...
    first round      0 1   3       7         15
    nobody has 7              ->   second round: 2 4 5 6
"""

from __future__ import annotations

from tokenlake.core.match_under_way import MatchUnderWay
from tokenlake.wire import Code

__all__ = ["MANY_NODES", "behind", "probes"]

MANY_NODES = 32
"""From so many on. With fewer, one round costs hardly more messages, and two take longer."""

_MISSING = Code.MISSING


def probes(match: MatchUnderWay, indices: list[int]) -> list[int]:
    """Which of `indices`, ascending, to ask about first; the others are noted in `match` for `behind`."""
    places = {(1 << power) - 1 for power in range(len(indices).bit_length())}
    match.probes = [index for place, index in enumerate(indices) if place in places]
    match.later = [index for place, index in enumerate(indices) if place not in places]
    return match.probes


def behind(match: MatchUnderWay) -> list[int]:
    """Which of the others to ask about, ascending, once the probes are answered; none the second time."""
    later, match.later = [index for index in match.later if match.segments[index] is None], []
    gaps = (index for index in match.probes if match.segments[index] is None and match.remotes[index] is None)
    gap = next(gaps, len(match.keys))
    wanted = [index for index in later if index < gap]
    for index in later[len(wanted) :]:
        # Whoever has it: it would be of no use.
        match.codes[index] = _MISSING
    return wanted
