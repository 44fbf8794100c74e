"""Where a request starts soonest: the tokens that each instance still has to compute for other requests, those of the
request that no node has, and those that have to be brought to the instance's node.

::

    prompt   |== here ==|== at other nodes ==|== in flight here ==|== in flight elsewhere ==|== new ==|
    cost           0          transfer                 0                   compute            compute
                               + copy                                       + copy                     + the queue here

A request that an instance has got and not answered is *in flight* there: a request that follows it to the same instance
starts after its prefill, and finds its prefix.

The queue is the prompts without a first token and the answers that have not ended. An answer counts as the expected
number of its tokens until it ends. Without it the queue of an instance whose prompts are cached would stay empty while
all requests with a common prefix go there, until no further request fits into its batch. A cached prefix of a prompt
that waits counts as `HELD_PRICE` of its tokens: where prompts are long, memory admits few of them at a time.

Costs are seconds once the time of a prefill is known (`Rates.prefill`), and tokens before. A second copy of a token
costs `Router.copy_price` times as much as computing it, beside the time that bringing it or computing it again takes:
it takes the slot of another segment, which is computed again when it is read. Without that cost, waiting for a prefix
in flight and computing it at an idle instance would cost the same, and most requests behind a new prefix would compute
it again. The price grows with the load, because work that an instance does again delays all requests behind it: at a
fixed price, a fleet whose memory is full of long prompts moves them when queues grow, evicts others for them, computes
those again, and never recovers.

A token that is brought costs `LEVEL_PRICE` more for each level between the two nodes (`tokenlake.location`). Among
equally loaded instances the request therefore goes to one that is near its prefix.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tokenlake.identity import NodeId, SegmentKey
from tokenlake.location import NOWHERE, Location, levels
from tokenlake.planner.rates import Rates
from tokenlake.planner.tree import Request

MAX_COPY_PRICE = 10.0
"""Limit of `Router.copy_price`, which grows without bound as all instances become busy."""
HELD_PRICE = 0.1
"""Cost of a cached token of a prompt that waits, as a multiple of the cost of computing it: the token takes memory of
the instance until the answer ends, which the prompts behind it may have to wait for."""
BUSY_WEIGHT = 0.01
"""Weight of the newest request in the share of busy instances."""

LEVEL_PRICE = 0.1
"""Cost of bringing some tokens' cache from a node that is one level away, as a multiple of the cost of computing these
tokens. It is more than a slow link takes for them, and less than a second copy costs."""

Owners = Mapping[SegmentKey, Collection[NodeId]]


class Prefill(NamedTuple):
    """One prefill: the number of tokens of a prompt to compute, and of cached tokens before them."""

    new: int
    prefix: int


class Start(msgspec.Struct, frozen=True):
    """The start of one request at one instance."""

    instance: str
    cost: float
    """Cost of the request and of those under way at the instance; comparable between instances of one call only."""
    prefill: Prefill
    moved: int
    """Number of tokens of the prefix that are brought from other nodes."""
    repeated: int
    """Number of tokens that this instance computes although another instance is computing them (in flight)."""


class _UnderWay(NamedTuple):
    """One request that was sent to an instance and is not finished."""

    instance: str
    keys: Sequence[SegmentKey]


class Router:
    """The requests under way at each instance, as a router sees them: sent, first token, finished. One thread.

    ::

        start = router.where(request, owners)
        router.sent(request, start)
        router.first_token(request.name)
        router.finished(request.name)        # also when the request failed, or its client went away
    """

    def __init__(
        self,
        instances: Mapping[str, NodeId],
        segment_tokens: int,
        segment_bytes: int,
        rates: Rates | None = None,
        seed: int = 0,
    ) -> None:
        """`instances`: the node of each instance, by name. `rates`: an object that the caller may go on updating
        (default: no rate is measured). `seed` decides between instances of equal cost; each of several routers needs
        another seed."""
        self.instances = dict(instances)
        self.rates = rates or Rates()
        self.locations: Mapping[NodeId, Location] = {}
        """The locations of the nodes. The caller sets it; without an entry a node has no labels."""
        self._segment_tokens = segment_tokens
        self._token_bytes = segment_bytes / segment_tokens
        self._seed = seed
        self._drawn = 0
        self._under_way: dict[str, _UnderWay] = {}
        self._unfinished = dict.fromkeys(instances, 0)
        """Number of the requests under way at each instance."""
        self._queues: dict[str, dict[str, Prefill]] = {instance: {} for instance in instances}
        """Prefills of the requests at each instance that have no first token yet, by name of the request."""
        self._busy = 0.0
        """Running mean over the requests sent: the share of the instances, 0 to 1, that had a prompt without a first
        token."""
        self._flying: dict[SegmentKey, dict[str, int]] = {}
        """For each segment, the number of unfinished requests that contain it at each instance."""

    # -- instances

    def join(self, instance: str, node: NodeId) -> None:
        """Add a new or restarted instance, at which no request is under way."""
        self.leave(instance)
        self.instances[instance] = node
        self._queues[instance] = {}
        self._unfinished[instance] = 0

    def leave(self, instance: str) -> None:
        """Remove an instance that is gone, with its unfinished requests."""
        for name in [name for name, each in self._under_way.items() if each.instance == instance]:
            self.finished(name)
        self.instances.pop(instance, None)
        self._queues.pop(instance, None)
        self._unfinished.pop(instance, None)

    # -- choices

    def where(self, request: Request, owners: Owners, among: Iterable[str] | None = None) -> Start:
        """Returns the start of least cost; one of several equal ones is drawn at random. Changes nothing but the state
        of the draw.

        `owners`: the nodes that have each segment, as of the last lookup; segments that are absent are at no node.
        `among`: the instances to choose from (default: all). Raises ValueError where there is none.
        """
        return self.least(request, self.starts(request, owners, among))

    def least(self, request: Request, starts: Sequence[Start]) -> Start:
        """Returns that one of the starts of a request that `where` chooses."""
        if not starts:
            raise ValueError(f"request {request.name}: there is no instance to choose from")
        least = min(start.cost for start in starts)
        cheapest = [start for start in starts if start.cost == least]
        return cheapest[0] if len(cheapest) == 1 else cheapest[self._draw() % len(cheapest)]

    def _draw(self) -> int:
        self._drawn += 1
        digest = hashlib.blake2b(f"{self._seed}#{self._drawn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def starts(self, request: Request, owners: Owners, among: Iterable[str] | None = None) -> list[Start]:
        """Returns the start of the request at each instance of `among` (default: all), with its cost. `owners`: the
        nodes that have each segment. Changes nothing."""
        chosen = self.instances if among is None else {name: self.instances[name] for name in among}
        keys = self._keys(request)
        depth = next((index for index, key in enumerate(keys) if not owners.get(key)), len(keys))
        held = dict.fromkeys(chosen.values(), 0)
        coming = dict.fromkeys(chosen, 0)
        crossed = self._levels_to([owners[key] for key in keys[:depth]], chosen)
        for key in keys[:depth]:
            nodes = owners[key]
            for node in nodes:
                if node in held:
                    held[node] += 1
            for instance in self._flying.get(key, ()):
                if instance in coming and chosen[instance] not in nodes:
                    coming[instance] += 1
                    crossed[instance] -= self.levels(chosen[instance], nodes)
        starts: list[Start] = []
        further = self.further(request, depth)
        furthest = max(further.values(), default=0)
        for instance, node in chosen.items():
            reach = further.get(instance, 0)
            cached = (depth + reach) * self._segment_tokens
            moved = (depth - held[node] - coming[instance]) * self._segment_tokens
            prefill = Prefill(max(1, request.tokens - cached), cached)
            repeated = (furthest - reach) * self._segment_tokens
            far = crossed[instance] * self._segment_tokens
            cost = self.queued(instance) + self.computing([prefill]) + self.moving(moved, repeated, far)
            starts.append(Start(instance, cost, prefill, moved, repeated))
        return starts

    def levels(self, node: NodeId, nodes: Iterable[NodeId]) -> int:
        """Returns the levels between a node and the nearest of `nodes`; 0 if there are none."""
        return self._nearest(self.locations.get(node, NOWHERE), nodes) if self.locations else 0

    def _nearest(self, location: Location, nodes: Iterable[NodeId]) -> int:
        return min((levels(location, self.locations.get(each, NOWHERE)) for each in nodes), default=0)

    def _levels_to(self, segments: Sequence[Collection[NodeId]], instances: Mapping[str, NodeId]) -> dict[str, int]:
        """Returns, for each instance, the sum of the levels between its node and segments. `segments`: the nodes that
        have each."""
        if not any(self.locations.values()):
            return dict.fromkeys(instances, 0)
        groups = [(nodes, sum(1 for _ in group)) for nodes, group in itertools.groupby(segments)]
        locations = {instance: self.locations.get(node, NOWHERE) for instance, node in instances.items()}
        sums = {
            location: sum(count * self._nearest(location, nodes) for nodes, count in groups)
            for location in dict.fromkeys(locations.values())
        }
        return {instance: sums[location] for instance, location in locations.items()}

    def _keys(self, request: Request) -> Sequence[SegmentKey]:
        """Returns the keys of the request that its cached prefix may contain: at least one token of the prompt is
        always computed."""
        return request.keys[: max(0, request.tokens - 1) // self._segment_tokens]

    # -- segments in flight

    def in_flight(self, key: SegmentKey) -> Collection[str]:
        """Returns the instances where an unfinished request contains the segment."""
        return self._flying.get(key, {}).keys()

    def further(self, request: Request, depth: int) -> dict[str, int]:
        """Returns, for each instance at which the segment behind the first `depth` is in flight, by how many segments
        in flight the prefix is longer there."""
        keys = self._keys(request)[depth:]
        live = set(self._flying.get(keys[0], ())) if keys else set()
        reach: dict[str, int] = {}
        for count, key in enumerate(keys, 1):
            live &= self._flying.get(key, {}).keys()
            if not live:
                break
            reach.update(dict.fromkeys(live, count))
        return reach

    # -- costs

    def queued(self, instance: str) -> float:
        """Returns the cost of the prompts at an instance that have no first token yet, their cached prefixes included,
        and of all answers that have not ended: a token of an answer counts as one of a prompt."""
        answer = Prefill(round(self.rates.answer_tokens.value), 0)
        answers = self._unfinished[instance] * self.computing([answer])
        queue = self._queues[instance].values()
        held = sum(self._computing_anew(prefix) for _, prefix in queue)
        return self.computing(queue) + HELD_PRICE * held + answers

    def computing(self, prefills: Iterable[Prefill]) -> float:
        """Returns the cost of some prefills, one after the other: seconds, or tokens while the time of a prefill is not
        known."""
        fit = self.rates.prefill
        if fit.known:
            return sum(fit.seconds(new, prefix) for new, prefix in prefills)
        return float(sum(new for new, _ in prefills))

    def _computing_anew(self, tokens: float) -> float:
        """Returns the cost of computing some tokens without a prefix."""
        fit = self.rates.prefill
        return fit.seconds(tokens, 0) if fit.known and tokens else tokens

    @property
    def copy_price(self) -> float:
        """Cost of a second copy of some tokens' cache, as a multiple of the cost of computing these tokens: 1 while the
        instances are idle, up to `MAX_COPY_PRICE`. With the utilisation u of a queue, a second of additional work takes
        1 / (1 - u) seconds from the requests behind it."""
        return min(MAX_COPY_PRICE, 1.0 / max(1e-9, 1.0 - self._busy))

    def moving(self, moved: float, repeated: float = 0.0, far: float = 0.0) -> float:
        """Returns the cost of bringing `moved` tokens of cache from other nodes, and of keeping second copies of these
        and of `repeated` tokens. `far`: the sum, over the tokens brought, of the levels between the two nodes."""
        copied = moved + repeated
        if not copied:
            return 0.0
        known = moved and self.rates.prefill.known
        transfer = self.rates.slowest_fetch_s(moved * self._token_bytes) if known else 0.0
        return transfer + self.copy_price * self._computing_anew(copied) + LEVEL_PRICE * self._computing_anew(far)

    # -- what passes through the router

    def sent(self, request: Request, start: Start) -> None:
        """Record that the request is sent to `start.instance`. An earlier request of this name counts as finished."""
        self.finished(request.name)
        busy = sum(map(bool, self._queues.values())) / len(self._queues)
        self._busy += BUSY_WEIGHT * (busy - self._busy)
        instance = start.instance
        keys = self._keys(request)
        self._under_way[request.name] = _UnderWay(instance, keys)
        self._unfinished[instance] += 1
        self._queues[instance][request.name] = start.prefill
        for key in keys:
            flying = self._flying.setdefault(key, {})
            flying[instance] = flying.get(instance, 0) + 1

    def first_token(self, name: str) -> None:
        """Record that the prefill of a request is done. Ignored if the request is not under way."""
        under_way = self._under_way.get(name)
        if under_way is not None:
            self._queues[under_way.instance].pop(name, None)

    def finished(self, name: str) -> None:
        """Record that a request was answered or failed. Ignored if the request is not under way."""
        self.first_token(name)
        under_way = self._under_way.pop(name, None)
        if under_way is None:
            return
        instance = under_way.instance
        self._unfinished[instance] -= 1
        for key in under_way.keys:
            flying = self._flying[key]
            flying[instance] -= 1
            if not flying[instance]:
                del flying[instance]
                if not flying:
                    del self._flying[key]

    def instance_of(self, name: str) -> str | None:
        """Returns the instance to which a request was sent; None if the request is not under way."""
        under_way = self._under_way.get(name)
        return None if under_way is None else under_way.instance

    def under_way(self, instance: str) -> int:
        """Returns the number of unfinished requests at an instance."""
        return self._unfinished.get(instance, 0)

    # -- checks

    def check_integrity(self) -> None:
        """Raises AssertionError when the queues and the segments in flight differ from those of the requests under
        way."""
        counts: dict[SegmentKey, dict[str, int]] = {}
        for each in self._under_way.values():
            for key in each.keys:
                at = counts.setdefault(key, {})
                at[each.instance] = at.get(each.instance, 0) + 1
        assert counts == self._flying
        assert self._queues.keys() == self._unfinished.keys() == self.instances.keys()
        placed = [each.instance for each in self._under_way.values()]
        assert all(placed.count(instance) == number for instance, number in self._unfinished.items())
        for instance, queue in self._queues.items():
            assert all(self._under_way[name].instance == instance for name in queue)
