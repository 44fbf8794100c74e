"""Prefill and decode on separate instances, with hot prefixes fetched from other instances, as in Mooncake's conductor.

Source: Qin et al., *Mooncake* (FAST '25, arXiv 2407.00079), algorithm 1 and sections 5 and 6. The prefill instance is
the one with the least expected time to the first token: queued prefills, plus the prefill itself, plus, where the best
prefix elsewhere is at least `balancing_threshold` times as long as the instance's own, the time to fetch that prefix
(which then shortens the prefill, and the copy stays). Queued time is the sum of expected prefills (as the authors say
in issue 749 of their repository). The decode instance is the one whose requests have the fewest tokens of context in
sum.

Left out: Mooncake refuses requests that would miss their objective when the cluster is overloaded; here all are served.
The value of the threshold is not published; 2 is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake_bench.routing.base import Choice, Fetch, Fleet, RoutedRequest, least

BALANCING_THRESHOLD = 2.0


def split(instances: int, prefill_parts: int, decode_parts: int) -> tuple[range, range]:
    """(numbers of the prefill instances, numbers of the decode instances), from 0 to `instances` - 1, divided in about
    the proportion `prefill_parts` to `decode_parts` with at least one of each kind."""
    prefill = round(instances * prefill_parts / (prefill_parts + decode_parts))
    prefill = min(max(1, prefill), instances - 1)
    return range(prefill), range(prefill, instances)


class Mooncake:
    """Mooncake's conductor as a `Router`; the docstring of the module describes the rule."""

    def __init__(
        self,
        fleet: Fleet,
        prefill: Sequence[int],
        decode: Sequence[int],
        balancing_threshold: float = BALANCING_THRESHOLD,
    ) -> None:
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode
        self._threshold = balancing_threshold
        self._queued_s = [0.0] * fleet.instances
        self._queued: list[dict[int, float]] = [{} for _ in range(fleet.instances)]
        """By instance and request number, the expected seconds of each prefill that has not produced its first
        token."""
        self._contexts = [0] * fleet.instances

    def choose(self, request: RoutedRequest, now: float) -> Choice:
        """Choose the prefill instance with the least expected time to the first token, and the decode instance with the
        fewest prompt tokens; see `Router`."""
        depths = self._fleet.knowledge.depths(request.chain)
        source = least([-depth for depth in depths], self._prefill, self._fleet.rng)
        missing = {depth: self._to_fetch(depth, depths[source]) for depth in dict.fromkeys(depths)}
        prefill_s = {depth: self._prefill_s(request, depth + missing[depth]) for depth in missing}
        ready_s = {depth: self._fetch_s(missing[depth]) + prefill_s[depth] for depth in missing}
        costs = [queued_s + ready_s[depth] for queued_s, depth in zip(self._queued_s, depths, strict=True)]
        prefill = least(costs, self._prefill, self._fleet.rng)
        decode = least(self._contexts, self._decode, self._fleet.rng)
        self._queued[prefill][request.number] = prefill_s[depths[prefill]]
        self._queued_s[prefill] += prefill_s[depths[prefill]]
        self._contexts[decode] += request.tokens
        self._fleet.knowledge.sent(request.chain, prefill)
        fetch = Fetch(source, depths[source]) if missing[depths[prefill]] else None
        return Choice(prefill, decode, fetch)

    def first_token(self, request: RoutedRequest, choice: Choice, now: float) -> None:
        """Remove the prefill from the queue of its instance, because the first token ends it; see `Router`."""
        queued = self._queued[choice.prefill]
        done_s = queued.pop(request.number)
        # The sum of expected seconds is reset when the queue is empty, because rounding errors would make idle
        # instances differ.
        self._queued_s[choice.prefill] = self._queued_s[choice.prefill] - done_s if queued else 0.0

    def finished(self, request: RoutedRequest, choice: Choice, output_tokens: int, now: float) -> None:
        """Subtract the prompt tokens of the request from its decode instance; see `Router`."""
        self._contexts[choice.decode] -= request.tokens

    def _to_fetch(self, depth: int, best: int) -> int:
        """Number of segments to fetch for an instance that has the first `depth` segments of a prompt, if the instance
        with the longest prefix has `best` of them: the difference, or 0 if `best` is less than the threshold times
        `depth`."""
        return best - depth if best >= self._threshold * depth else 0

    def _prefill_s(self, request: RoutedRequest, depth: int) -> float:
        cached = depth * self._fleet.segment_tokens
        return self._fleet.engine.prefill_s(max(1, request.tokens - cached), cached)

    def _fetch_s(self, segments: int) -> float:
        return self._fleet.engine.transfer_s(segments * self._fleet.segment_tokens)
