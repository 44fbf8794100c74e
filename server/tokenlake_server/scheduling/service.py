"""The service `Scheduling`: the planner's functions, over lookups of this node's rules."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from functools import partial

from tokenlake.config import Tenant
from tokenlake.core import events
from tokenlake.core.cluster.members import MemberState
from tokenlake.core.engines.survey import MAX_LOCATED
from tokenlake.core.instructions import Located, PrefetchDone, UnpinDone
from tokenlake.errors import ConfigurationError, LayoutRefused, LimitReached
from tokenlake.hints import MAX_PIN_S
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.metrics import Level, Metric
from tokenlake.opaque_layout import AnyLayout, decode_layout
from tokenlake.planner import Model, Rates, Request, cache_load, gen_plans, grow
from tokenlake.wire.slots import join_keys
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.cached import Cached
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.messages import check_name, layout_message
from tokenlake_server.control.service import Unary
from tokenlake_server.control.work import Work
from tokenlake_server.engines.listener import EngineListener
from tokenlake_server.loop.driver import Driver
from tokenlake_server.scheduling.fleets import Fleet, Fleets
from tokenlake_server.scheduling.messages import (
    check_size,
    check_work,
    distinct,
    hints_of,
    plans_message,
    prefetched_message,
    rates_of,
    request_of,
    start_message,
    tree_message,
    tree_of,
)

FLEET_BYTES = Metric(
    "tokenlake_fleet_bytes",
    "Bytes that are charged for the fleets of schedulers: instances, requests under way",
    "tenant",
    kind="gauge",
)
AT_ONCE = 2
"""Questions of one call that the rules answer at a time; each takes up to half a millisecond of the control loop."""
MAX_BATCHES = 64
MAX_REPORTS = 4096


class Scheduling:
    """The methods of the service `Scheduling`. They are called in the admin thread; calculations, and the fleets that
    these change, belong to the thread of `work`."""

    def __init__(self, bridge: Bridge, driver: Driver, engines: EngineListener, work: Work, tenants: int) -> None:
        """`tenants`: their number, which share the bytes of fleets."""
        self._bridge = bridge
        self._driver = driver
        self._engines = engines
        self._work = work
        self._fleets = Fleets(tenants)
        self._members = Cached(lambda: bridge.call(driver.core.members))
        self._kept_bytes: dict[str, int] = {}
        """The bytes that are kept for the fleets of each tenant; read by the control loop."""
        self.functions: dict[str, Unary] = {
            "GetLayouts": self.get_layouts,
            "GetPrefixTree": self.get_prefix_tree,
            "GetCacheLoad": self.get_cache_load,
            "GenPlans": self.gen_plans,
            "GetStart": self.get_start,
            "Report": self.report,
            "Hint": self.hint,
            "Prefetch": self.prefetch,
            "Unpin": self.unpin,
        }

    async def get_layouts(self, caller: Caller, message: pb.GetLayoutsRequest) -> pb.GetLayoutsResponse:
        """List the layouts of the tenant's engines."""
        return pb.GetLayoutsResponse(layouts=[layout_message(each) for each in await self._layouts(caller.own())])

    async def get_prefix_tree(self, caller: Caller, message: pb.GetPrefixTreeRequest) -> bytes:
        """The cached prefixes of some prompts, and the states of the nodes that have them."""
        tenant, segment_tokens = caller.own(), message.segment_tokens
        requests = await self._requests(tenant, message.prompts, segment_tokens)
        owners, disk_s = await self._locate(tenant, requests, segment_tokens, message.deadline_s, disks=True)
        states = await self._members.get()

        def work() -> bytes:
            tree = grow(requests, owners, segment_tokens, disk_s)
            named = {node for sequence in tree.sequences for node in sequence.owners}
            nodes = [_state(each) for each in states if each.node in named]
            return pb.GetPrefixTreeResponse(tree=tree_message(tree), nodes=nodes).SerializeToString()

        return await self._work.run(tenant.name, work)

    async def get_cache_load(self, caller: Caller, message: pb.GetCacheLoadRequest) -> pb.GetCacheLoadResponse:
        """The share of each node's time for attention over cached segments."""
        tenant = caller.own()

        def work() -> pb.GetCacheLoadResponse:
            fleet, model, instances = self._update(tenant, message.fleet, time.monotonic())
            tree, rates = tree_of(message.tree, tenant), _rates(fleet, message)
            load = cache_load(message.requests, tree, instances, model.layers, rates)
            return pb.GetCacheLoadResponse(load={str(node): share for node, share in load.items()})

        return await self._work.run(tenant.name, work)

    async def gen_plans(self, caller: Caller, message: pb.GenPlansRequest) -> bytes:
        """Plan batches."""
        tenant = caller.own()
        if len(message.batches) > MAX_BATCHES:
            raise LimitReached(f"{len(message.batches)} batches; the limit is {MAX_BATCHES}")
        states = await self._members.get()

        def work() -> bytes:
            try:
                # It reads many files the first time.
                __import__("scipy.optimize")
            except ModuleNotFoundError:
                expected = "pip install 'tokenlake[scheduler]' on this node: plans need scipy"
                raise ConfigurationError("scheduler", "", expected) from None
            fleet, model, instances = self._update(tenant, message.fleet, time.monotonic())
            idle = _chosen(instances, message.idle)
            batches, dops = [list(each.requests) for each in message.batches], [each.dop for each in message.batches]
            tree = tree_of(message.tree, tenant)
            fleet.router.locations = {each.node: each.location for each in states}
            if any(fleet.router.locations.values()):
                check_work(tree, len(idle))
            plans = gen_plans(batches, dops, tree, idle, model, _rates(fleet, message), fleet.router)
            return plans_message(plans).SerializeToString()

        return await self._work.run(tenant.name, work)

    async def get_start(self, caller: Caller, message: pb.GetStartRequest) -> bytes:
        """The instance where a request starts soonest."""
        tenant, now = caller.own(), time.monotonic()
        fleet, _, instances = await self._work.run(tenant.name, lambda: self._update(tenant, message.fleet, now))
        segment_tokens = message.fleet.segment_tokens
        (request,) = await self._requests(tenant, [message.prompt], segment_tokens)
        # The time on a disk is the same for each instance, so that it does not change the choice.
        owners, _ = await self._locate(tenant, [request], segment_tokens, message.deadline_s, disks=False)
        states = await self._members.get()

        def work() -> bytes:
            among = list(_chosen(instances, message.among))
            fleet.router.locations = {each.node: each.location for each in states}
            # The instances may have changed while the rules answered.
            fleet.follow(instances, now, self._fleets.share)
            starts = fleet.router.starts(request, owners, among)
            chosen = fleet.router.least(request, starts)
            if message.send:
                fleet.chosen(request, chosen, now)
                self._fit(tenant)
            reply = pb.GetStartResponse(chosen=start_message(chosen), starts=[start_message(each) for each in starts])
            return reply.SerializeToString()

        return await self._work.run(tenant.name, work)

    async def report(self, caller: Caller, message: pb.ReportRequest) -> pb.ReportResponse:
        """Record the events of requests of a fleet: sent, first token, finished."""
        if len(message.happened) > MAX_REPORTS:
            raise LimitReached(f"{len(message.happened)} reports; the limit of a message is {MAX_REPORTS}")
        tenant, now = caller.own(), time.monotonic()

        def work() -> pb.ReportResponse:
            fleet, _, _ = self._update(tenant, message.fleet, now)
            try:
                for each in message.happened:
                    fleet.happened(each, tenant, message.fleet.segment_tokens, now)
            finally:
                self._fit(tenant)
            return pb.ReportResponse(under_way=len(fleet))

        return await self._work.run(tenant.name, work)

    async def hint(self, caller: Caller, message: pb.HintRequest) -> pb.HintResponse:
        """Give hints about the segments of a prompt."""
        tenant, hints = caller.own(), hints_of(message)
        (request,) = await self._requests(tenant, [message.prompt], message.segment_tokens)
        for at in range(0, len(request.keys), MAX_LOCATED):
            event = events.HintGiven(tenant.name, join_keys(list(request.keys[at : at + MAX_LOCATED])), hints)
            await self._bridge.call(partial(self._driver.handle, event), tenant.name)
        return pb.HintResponse()

    async def prefetch(self, caller: Caller, message: pb.PrefetchRequest) -> pb.PrefetchResponse:
        """Bring the segments of a prompt to this node."""
        tenant = caller.target(message.tenant)
        check_name("node", message.source)
        if not 0 <= message.pin_s <= MAX_PIN_S:
            raise ValueError(f"pin_s is {message.pin_s}; expected 0 (no pin) to {MAX_PIN_S:.0f} seconds")
        known = await self._layouts(tenant)
        if message.layout:
            known.append(decode_layout(message.layout))
        layout = next((each for each in known if bytes(each.fingerprint()) == message.prompt.fingerprint), None)
        if layout is None:
            raise LayoutRefused("no engine of this tenant has connected to this node with a layout of this fingerprint")
        (request,) = await self._requests(tenant, [message.prompt], layout.segment_tokens)
        codes = bytearray()
        for at in range(0, len(request.keys), MAX_LOCATED):
            make = partial(
                events.PrefetchRequested,
                tenant=tenant.name,
                keys=join_keys(list(request.keys[at : at + MAX_LOCATED])),
                slot_bytes=layout.segment_bytes,
                shards=layout.shards,
                first=at,
                source=message.source,
                pin_s=message.pin_s,
            )
            done: PrefetchDone = await self._bridge.ask(make, tenant.name)
            codes += done.codes
        return prefetched_message(codes)

    async def unpin(self, caller: Caller, message: pb.UnpinRequest) -> pb.UnpinResponse:
        """End the pins of a prompt's segments, or of the whole tenant."""
        tenant = caller.target(message.tenant)
        parts = [b""]
        if message.HasField("prompt"):
            (request,) = await self._requests(tenant, [message.prompt], message.segment_tokens)
            parts = [
                join_keys(list(request.keys[at : at + MAX_LOCATED])) for at in range(0, len(request.keys), MAX_LOCATED)
            ]
        unpinned = 0
        for part in parts:
            make = partial(events.UnpinRequested, tenant=tenant.name, keys=part)
            done: UnpinDone = await self._bridge.ask(make, tenant.name)
            unpinned += done.unpinned
        return pb.UnpinResponse(unpinned=unpinned)

    # -- in the thread of `work`

    def _update(self, tenant: Tenant, fleet: pb.Fleet, now: float) -> tuple[Fleet, Model, dict[str, NodeId]]:
        found = self._fleets.update(tenant.name, fleet, now)
        self._kept_bytes = self._fleets.kept_bytes
        return found

    def _fit(self, tenant: Tenant) -> None:
        self._fleets.fit(tenant.name)
        self._kept_bytes = self._fleets.kept_bytes

    def gauges(self) -> list[Level]:
        """Gauges for the metrics page. Called on the control loop."""
        return [Level(FLEET_BYTES, (tenant,), nbytes) for tenant, nbytes in self._kept_bytes.items()]

    # -- inside

    async def _layouts(self, tenant: Tenant) -> list[AnyLayout]:
        return await self._bridge.call(lambda: self._engines.layouts.of(tenant.name), tenant.name)

    async def _requests(self, tenant: Tenant, prompts: Iterable[pb.Prompt], segment_tokens: int) -> list[Request]:
        prompts = list(prompts)
        check_size(prompts, segment_tokens)
        layouts: dict[bytes, AnyLayout] = {}
        if any(each.token_ids for each in prompts):
            layouts = {bytes(each.fingerprint()): each for each in await self._layouts(tenant)}
        return await self._work.run(
            tenant.name, lambda: [request_of(each, segment_tokens, tenant, layouts) for each in prompts]
        )

    async def _locate(
        self, tenant: Tenant, requests: list[Request], segment_tokens: int, deadline_s: float, *, disks: bool
    ) -> tuple[dict[SegmentKey, tuple[NodeId, ...]], dict[SegmentKey, float]]:
        """The nodes that have each segment of the requests, and, if `disks`, the seconds of those on a disk."""
        if not (math.isfinite(deadline_s) and deadline_s >= 0):
            raise ValueError(f"deadline_s is {deadline_s}; expected seconds, or 0")
        keys = distinct(requests, segment_tokens)
        found: dict[SegmentKey, tuple[NodeId, ...]] = {}
        disk_s: dict[SegmentKey, float] = {}
        parts = [keys[at : at + MAX_LOCATED] for at in range(0, len(keys), MAX_LOCATED)]

        async def ask() -> None:
            while parts:
                part = parts.pop()
                packed = join_keys(part)
                make = partial(_locate, tenant=tenant.name, keys=packed, deadline_s=deadline_s, disks=disks)
                answer: Located = await self._bridge.ask(make, tenant.name)
                names = [NodeId(node) for node in answer.nodes]
                for key, owners in zip(part, answer.owners, strict=True):
                    found[key] = tuple(names[number] for number in owners)
                disk_s.update((key, each) for key, each in zip(part, answer.disk_s, strict=False) if each)

        if len(parts) > 1:
            await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        else:
            await ask()
        return found, disk_s


def _locate(number: int, *, tenant: str, keys: bytes, deadline_s: float, disks: bool) -> events.LocateRequested:
    return events.LocateRequested(number, tenant, keys, deadline_s, disks)


def _state(each: MemberState) -> pb.NodeState:
    return pb.NodeState(
        node=each.node,
        usable=each.usable,
        draining=each.draining,
        sent_bytes_per_s=each.load,
        free_share=each.free,
    )


def _rates(fleet: Fleet, message: pb.GetCacheLoadRequest | pb.GenPlansRequest) -> Rates:
    return rates_of(message.rates) if message.HasField("rates") else fleet.rates


def _chosen(instances: Mapping[str, NodeId], names: Iterable[str]) -> dict[str, NodeId]:
    """The named instances, or all without names. Raises ValueError for another name."""
    chosen = {}
    for name in names:
        if name not in instances:
            raise ValueError(f"'{name}' is no instance of the fleet")
        chosen[name] = instances[name]
    return chosen or dict(instances)
