"""The requests under way and the measured times of the fleets that routers report: by tenant, within bounds.

Everything that is kept for a fleet is charged to its tenant in bytes: names, nodes, keys of requests under way. The
tenants share the total in equal parts. Beyond the part of a tenant its oldest requests count as finished, then ends of
requests are forgotten, then the fleets that were used longest ago; instances that alone take more are refused.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict

from tokenlake.config import Tenant
from tokenlake.errors import LimitReached
from tokenlake.identity import NodeId
from tokenlake.planner import Model, Rates, Request, Router
from tokenlake.planner.router import Start
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.messages import MAX_NAME, check_name
from tokenlake_server.scheduling.messages import model_of, request_of, start_of

TOTAL_BYTES = 8 << 20
"""Limit of the bytes that the fleets of all tenants make the daemon keep."""
FLEET_BYTES, INSTANCE_BYTES, REQUEST_BYTES, SEGMENT_BYTES, ENDED_BYTES = 8192, 700, 900, 330, 250
"""Bytes that are charged for a fleet, for each instance, for each request under way and each of its segments, and for
each end of a request, beside the names."""

MAX_FLEETS = 64
"""Limit of the fleets of a tenant; the one of the tenant that was used longest ago is forgotten."""
MAX_INSTANCES = 1024
IDLE_S = 3600.0
"""Seconds after which a fleet is forgotten that is not used, and an instance that no caller names."""
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

    def __init__(self, fleet: pb.Fleet, model: Model, now: float) -> None:
        self.rates = Rates()
        self.router = Router({}, fleet.segment_tokens, model.segment_bytes, self.rates)
        self.used_at = now
        self._named: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By name of an instance, in the order of the time at which a caller last named it: that time, and the bytes
        that the instance takes."""
        self._under_way: OrderedDict[str, tuple[float, int, int]] = OrderedDict()
        """By name of a request: the time at which it was sent, the number of its segments, and the bytes that it
        takes."""
        self._segments = 0
        self._ended: OrderedDict[str, float] = OrderedDict()
        """By name of a request whose end was reported while it was not under way: the time of the report."""
        self._fixed = FLEET_BYTES + sys.getsizeof(fleet.name)
        self.instance_bytes = 0
        """Bytes that the instances take."""
        self.request_bytes = 0
        """Bytes that the requests under way take."""
        self.ended_bytes = 0
        """Bytes that the ends of requests that were not under way take."""

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._under_way)

    @property
    def kept_bytes(self) -> int:
        """The bytes that are charged for the fleet."""
        return self._fixed + self.instance_bytes + self.request_bytes + self.ended_bytes

    def follow(self, instances: dict[str, NodeId], now: float, limit: int = TOTAL_BYTES) -> None:
        """Take the instances that a caller names, in addition to those of other callers, and forget old requests and
        instances. Raises `LimitReached` for more instances, or more bytes of them, than a fleet may have."""
        self.used_at = now
        while self._named and next(iter(self._named.values()))[0] < now - IDLE_S:
            name = next(iter(self._named))
            if name in instances:
                self._name(name, now)
            else:
                self.leave(name)
        if len(self.router.instances | instances) > MAX_INSTANCES:
            raise LimitReached(
                f"{len(self.router.instances | instances)} instances of a fleet; the limit is {MAX_INSTANCES}: report "
                f"those that are gone, or wait {IDLE_S:.0f} s from their last call on"
            )
        new = {name: node for name, node in instances.items() if self.router.instances.get(name) != node}
        more = sum(_instance_bytes(name, node) for name, node in new.items())
        if self._fixed + self.instance_bytes + more > limit:
            raise LimitReached(
                f"the instances of a fleet would take {self.instance_bytes + more} bytes; limit 'fleet_bytes' of the "
                f"tenant is {limit}: use fewer instances or shorter names, or report those that are gone"
            )
        for name, node in new.items():
            self.leave(name)
            self.router.join(name, node)
            nbytes = _instance_bytes(name, node)
            self.instance_bytes += nbytes
            self._named[name] = now, nbytes
        for name in instances:
            self._name(name, now)
        while self._under_way and next(iter(self._under_way.values()))[0] < now - UNDER_WAY_S:
            self.finish_oldest()
        while self._ended and next(iter(self._ended.values())) < now - ENDED_S:
            self.forget_oldest_end()

    def _name(self, instance: str, now: float) -> None:
        self._named[instance] = now, self._named[instance][1]
        self._named.move_to_end(instance)

    def chosen(self, request: Request, start: Start, now: float) -> None:
        """Record that a request is sent where `GetStart` chose, unless its router has given it up: the report of the
        end may overtake a `GetStart` that is delayed."""
        if self._forget_end(request.name) < now - ENDED_S:
            self.sent(request, start, now)

    def sent(self, request: Request, start: Start, now: float) -> None:
        """Record that a request was sent."""
        if start.instance not in self.router.instances:
            raise ValueError(f"{start.instance[:MAX_NAME]!r} is no instance of the fleet")
        self.finished(request.name)
        self.router.sent(request, start)
        nbytes = REQUEST_BYTES + sys.getsizeof(request.name) + SEGMENT_BYTES * len(request.keys)
        self._under_way[request.name] = now, len(request.keys), nbytes
        self._segments += len(request.keys)
        self.request_bytes += nbytes
        while len(self._under_way) > MAX_UNDER_WAY or (self._segments > MAX_SEGMENTS and len(self._under_way) > 1):
            self.finish_oldest()

    def finished(self, name: str) -> None:
        """Record that a request was answered or failed."""
        self.router.finished(name)
        _, segments, nbytes = self._under_way.pop(name, (0.0, 0, 0))
        self._segments -= segments
        self.request_bytes -= nbytes

    def finish_oldest(self) -> None:
        """Count the oldest request under way as finished."""
        self.finished(next(iter(self._under_way)))

    def leave(self, instance: str) -> None:
        """Remove an instance, with its requests."""
        for name in [name for name in self._under_way if self.router.instance_of(name) == instance]:
            self.finished(name)
        self.router.leave(instance)
        self.instance_bytes -= self._named.pop(instance, (0.0, 0))[1]

    def _ends(self, name: str, now: float) -> None:
        """Keep the end of a request that is not under way."""
        self._forget_end(name)
        self._ended[name] = now
        self.ended_bytes += ENDED_BYTES + sys.getsizeof(name)
        if len(self._ended) > MAX_ENDED:
            self.forget_oldest_end()

    def forget_oldest_end(self) -> None:
        """Forget the oldest end of a request that was not under way."""
        self._forget_end(next(iter(self._ended)))

    def _forget_end(self, name: str) -> float:
        """Forget the end of a request. Returns its time, or -inf."""
        at = self._ended.pop(name, None)
        if at is None:
            return -math.inf
        self.ended_bytes -= ENDED_BYTES + sys.getsizeof(name)
        return at

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
                    self._ends(what.finished, now)
                self.finished(what.finished)
            case "gone":
                self.leave(what.gone)
            case "prefilled":
                took = what.prefilled
                self.rates.prefill.add(took.new_tokens, took.prefix_tokens, took.seconds, now)
            case "answered_tokens":
                self.rates.answer_tokens.add(float(what.answered_tokens))
            case _:
                raise ValueError("a report without content")


class Fleets:
    """The fleets of all tenants. One thread at a time."""

    def __init__(self, tenants: int = 1, total: int = TOTAL_BYTES) -> None:
        """`tenants`: the number of tenants that share `total` bytes."""
        self.share = total // max(1, tenants)
        """Limit of the bytes that the fleets of one tenant make the daemon keep."""
        self._fleets: dict[str, OrderedDict[tuple[str, int, int], Fleet]] = {}
        """By tenant; those of a tenant are in the order of their last use."""

    def update(self, tenant: str, message: pb.Fleet, now: float) -> tuple[Fleet, Model, dict[str, NodeId]]:
        """Make or find the fleet that a message describes, and add the instances that the message names. Returns the
        fleet, its model and these instances. Raises ValueError and `LimitReached`."""
        model = model_of(message)
        check_name("fleet", message.name)
        instances = {name: NodeId(node) for name, node in message.instances.items()}
        for name, node in instances.items():
            check_name("instance", name)
            check_name("node", node)
        self._forget_idle(now)
        at = message.name, message.segment_tokens, message.segment_bytes
        own = self._fleets.get(tenant, OrderedDict())
        fleet = own.get(at)
        if fleet is None:
            fleet = Fleet(message, model, now)
        fleet.follow(instances, now, self.share)
        own[at] = fleet
        own.move_to_end(at)
        self._fleets[tenant] = own
        if len(own) > MAX_FLEETS:
            own.popitem(last=False)
        self.fit(tenant)
        return fleet, model, instances

    def fit(self, tenant: str) -> None:
        """Bring the fleets of a tenant within its part of the bytes: its oldest requests count as finished, then ends
        of requests are forgotten, then the fleets that were used longest ago. To be called after requests were sent."""
        own = self._fleets.get(tenant)
        if own is None:
            return
        kept = sum(each.kept_bytes for each in own.values())
        while kept > self.share:
            largest = max(own.values(), key=lambda fleet: fleet.request_bytes)
            before = largest.kept_bytes
            if largest.request_bytes:
                largest.finish_oldest()
                kept -= before - largest.kept_bytes
            elif (ending := next((fleet for fleet in own.values() if fleet.ended_bytes), None)) is not None:
                before = ending.kept_bytes
                ending.forget_oldest_end()
                kept -= before - ending.kept_bytes
            elif len(own) > 1:
                kept -= own.popitem(last=False)[1].kept_bytes
            else:
                break

    def _forget_idle(self, now: float) -> None:
        for tenant, own in list(self._fleets.items()):
            while own and next(iter(own.values())).used_at < now - IDLE_S:
                own.popitem(last=False)
            if not own:
                del self._fleets[tenant]

    @property
    def kept_bytes(self) -> dict[str, int]:
        """The bytes that are charged for the fleets of each tenant."""
        return {tenant: sum(each.kept_bytes for each in own.values()) for tenant, own in self._fleets.items()}

    def __len__(self) -> int:
        return sum(map(len, self._fleets.values()))


def _instance_bytes(name: str, node: str) -> int:
    return INSTANCE_BYTES + sys.getsizeof(name) + sys.getsizeof(node)
