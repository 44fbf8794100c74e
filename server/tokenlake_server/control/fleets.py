"""The requests under way and the measured times of the fleets that routers report: by tenant, within bounds."""

from __future__ import annotations

import math
from collections import OrderedDict

from tokenlake.config import Tenant
from tokenlake.errors import LimitReached
from tokenlake.identity import NodeId
from tokenlake.planner import Model, Rates, Request, Router
from tokenlake.planner.router import Start
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.messages import MAX_NAME, model_of, request_of, start_of

__all__ = ["Fleet", "Fleets"]

MAX_FLEETS = 64
"""Limit of the fleets of a tenant; the one of the tenant that was used longest ago is forgotten."""
MAX_INSTANCES = 1024
MAX_UNDER_WAY = 8192
"""Requests under way in a fleet; the oldest ones count as finished."""
MAX_SEGMENTS = 1 << 15
"""Segments of those requests, of which each takes some 300 bytes; the oldest requests count as finished."""
UNDER_WAY_S = 900.0
"""Seconds after which a request counts as finished: its router may have died."""
ENDED_S = 60.0
"""Seconds for which the end of a request is kept that was not under way: longer than a `GetStart` is delayed."""
MAX_ENDED = 1024
"""Limit of those ends in a fleet; the oldest is forgotten."""


class Fleet:
    """One fleet: its router, its rates, and the order of the requests under way."""

    def __init__(self, fleet: pb.Fleet, model: Model) -> None:
        self.rates = Rates()
        self.router = Router({}, fleet.segment_tokens, model.segment_bytes, self.rates)
        self._under_way: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By name of a request: the time at which it was sent, and the number of its segments."""
        self._segments = 0
        self._ended: OrderedDict[str, float] = OrderedDict()
        """By name of a request whose end was reported while it was not under way: the time of the report."""

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._under_way)

    def follow(self, instances: dict[str, NodeId], now: float) -> None:
        """Take the instances that a caller names, in addition to those of other callers, and forget old requests.
        Raises `LimitReached`."""
        if len(self.router.instances | instances) > MAX_INSTANCES:
            raise LimitReached(f"{len(self.router.instances | instances)} instances; the limit is {MAX_INSTANCES}")
        for name, node in instances.items():
            if self.router.instances.get(name) != node:
                self.leave(name)
                self.router.join(name, node)
        while self._under_way and next(iter(self._under_way.values()))[0] < now - UNDER_WAY_S:
            self.finished(next(iter(self._under_way)))

    def chosen(self, request: Request, start: Start, now: float) -> None:
        """Record that a request is sent where `GetStart` chose, unless its router has given it up: the report of the
        end may overtake a `GetStart` that is delayed."""
        if self._ended.pop(request.name, -math.inf) < now - ENDED_S:
            self.sent(request, start, now)

    def sent(self, request: Request, start: Start, now: float) -> None:
        """Record that a request was sent."""
        if start.instance not in self.router.instances:
            raise ValueError(f"'{start.instance}' is no instance of the fleet")
        self.finished(request.name)
        self.router.sent(request, start)
        self._under_way[request.name] = now, len(request.keys)
        self._segments += len(request.keys)
        while len(self._under_way) > MAX_UNDER_WAY or (self._segments > MAX_SEGMENTS and len(self._under_way) > 1):
            self.finished(next(iter(self._under_way)))

    def finished(self, name: str) -> None:
        """Record that a request was answered or failed."""
        self.router.finished(name)
        self._segments -= self._under_way.pop(name, (0.0, 0))[1]

    def leave(self, instance: str) -> None:
        """Remove an instance, with its requests."""
        for name in [name for name in self._under_way if self.router.instance_of(name) == instance]:
            self.finished(name)
        self.router.leave(instance)

    def happened(self, what: pb.Happened, tenant: Tenant, segment_tokens: int, now: float) -> None:
        """Record one event of a request of the fleet. Raises ValueError."""
        match what.WhichOneof("what"):
            case "sent":
                request = request_of(what.sent.prompt, segment_tokens, tenant, {})
                self.sent(request, start_of(what.sent.start), now)
            case "first_token":
                self.router.first_token(what.first_token)
            case "finished":
                if what.finished not in self._under_way and len(what.finished) <= MAX_NAME:
                    self._ended[what.finished] = now
                    if len(self._ended) > MAX_ENDED:
                        self._ended.popitem(last=False)
                self.finished(what.finished)
            case "gone":
                self.leave(what.gone)
            case "prefilled":
                took = what.prefilled
                self.rates.prefill.add(took.new_tokens, took.prefix_tokens, took.seconds, now)
            case "answered_tokens":
                self.rates.answer_tokens.add(float(what.answered_tokens), now)
            case _:
                raise ValueError("a report without content")


class Fleets:
    """The fleets of all tenants. Used in the admin thread only."""

    def __init__(self) -> None:
        self._fleets: dict[str, OrderedDict[tuple[str, int, int], Fleet]] = {}
        """By tenant; those of a tenant are in the order of their last use."""

    def update(self, tenant: str, message: pb.Fleet, now: float) -> tuple[Fleet, Model, dict[str, NodeId]]:
        """Make or find the fleet that a message describes, and add the instances that the message names. Returns the
        fleet, its model and these instances. Raises ValueError and `LimitReached`."""
        model = model_of(message)
        at = message.name, message.segment_tokens, message.segment_bytes
        own = self._fleets.setdefault(tenant, OrderedDict())
        fleet = own.get(at)
        if fleet is None:
            fleet = own[at] = Fleet(message, model)
            if len(own) > MAX_FLEETS:
                own.popitem(last=False)
        own.move_to_end(at)
        instances = {name: NodeId(node) for name, node in message.instances.items()}
        fleet.follow(instances, now)
        return fleet, model, instances

    def __len__(self) -> int:
        return sum(map(len, self._fleets.values()))
