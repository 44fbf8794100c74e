"""The service `Admin`: states, settings, members, eviction."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping

from tokenlake.config import ServerConfig
from tokenlake.config.setting import describe
from tokenlake.core import events
from tokenlake.core.instructions import EvictionDone
from tokenlake.core.orders import MAX_ORDERED
from tokenlake.errors import LimitReached
from tokenlake.keys import KEY_BYTES
from tokenlake.location import shown_location
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.cached import Cached
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.messages import (
    MAX_KEYS,
    activity_message,
    check_name,
    keys_of,
    layout_message,
)
from tokenlake_server.control.node_parts import NodeParts
from tokenlake_server.control.service import Unary
from tokenlake_server.metrics_page import Snapshot
from tokenlake_server.page.tokens import DEFAULT_S as GRANT_S
from tokenlake_server.page.tokens import MAX_S as MAX_GRANT_S
from tokenlake_server.page.tokens import PageTokens
from tokenlake_server.peers.measurement import MAX_BYTES, MAX_S
from tokenlake_server.peers.states import PeerState
from tokenlake_server.version import VERSION

SHOWN, MAX_SHOWN = 10, 256
"""Default and limit of the prefixes and calls of `GetActivity`."""


class Admin:
    """The methods of the service `Admin`. They are called in the admin thread."""

    def __init__(self, bridge: Bridge, node: NodeParts, page_tokens: PageTokens) -> None:
        self._bridge = bridge
        self._node = node
        self._page_tokens = page_tokens
        self._started = time.monotonic()
        self.awaited = False
        """True once a caller has let this node drain, and waits for its account."""
        self.account_read = asyncio.Event()
        """Set once a caller has read the account of this node's drain."""
        self.status = Cached(self._read_status)
        """The state of the node, for all tenants."""
        self.cluster = Cached(self._read_cluster)
        self.recent = Cached(lambda: bridge.call(node.driver.core.recent_requests))
        self.functions: dict[str, Unary] = {
            "GetStatus": self.get_status,
            "GetCluster": self.get_cluster,
            "GetConfig": self.get_config,
            "Explain": self.explain,
            "GetEngines": self.get_engines,
            "GetActivity": self.get_activity,
            "GrantPage": self.grant_page,
            "MeasurePeer": self.measure_peer,
            "Drain": self.drain,
            "Remove": self.remove,
            "Evict": self.evict,
            "WeightsChanged": self.weights_changed,
        }

    async def get_status(self, caller: Caller, message: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """The state of this node. A caller that is no admin sees the slots and refused engines of its own tenant
        only."""
        status = await self.status.get()
        return status if caller.admin else of_tenant(status, caller.own().name)

    async def _read_status(self) -> pb.GetStatusResponse:
        snapshot, refused = await self._bridge.call(lambda: (self._node.snapshot(), self._node.engines.without_pool()))
        state, now = snapshot.membership, time.monotonic()
        return pb.GetStatusResponse(
            node=self._node.config.node,
            cluster=self._node.config.cluster,
            version=VERSION,
            incarnation=self._node.driver.core.config.incarnation,
            uptime_s=now - self._started,
            memory_bytes=self._node.config.memory,
            spare_bytes=snapshot.spare_bytes,
            unusable_bytes=snapshot.unusable_bytes,
            pools=[pb.SlotPool(**each.plain()) for each in snapshot.pools],
            counters={metric.name: value for metric, value in snapshot.counters.items()},
            peers=_peers(snapshot.peers, now),
            membership=pb.Membership(
                source=state.source,
                known=state.known,
                epoch=state.epoch,
                problem=state.problem,
                absent=state.absent,
                unproven=_peers(snapshot.unproven, now),
            ),
            engines=snapshot.engines,
            processes=snapshot.processes,
            refused=[
                pb.RefusedEngine(
                    tenant=each.tenant,
                    pid=each.pid,
                    uid=each.uid,
                    reason=each.reason,
                    problem=each.problem,
                    cure=each.reason.cure,
                    attempts=each.attempts,
                    for_s=max(0.0, now - each.first),
                    last_s=max(0.0, now - each.last),
                )
                for each in refused
            ],
            clock_s=time.time(),
            tenants=_by_tenant(snapshot),
            disks=_disks(snapshot),
            kv_events=[pb.KvEventStream(**each._asdict()) for each in snapshot.streams],
        )

    async def get_cluster(self, caller: Caller, message: pb.GetClusterRequest) -> pb.GetClusterResponse:
        """The members of the cluster, as this node knows them."""
        cluster = await self.cluster.get()
        if any(each.node == self._node.config.node for each in cluster.drained):
            self.account_read.set()
        return cluster

    async def _read_cluster(self) -> pb.GetClusterResponse:
        core, membership = self._node.driver.core, self._node.membership
        record, states, known_members, controls = await self._bridge.call(
            lambda: (core.record, core.members(), membership.members, self._node.controls())
        )
        known = {str(each.node): each for each in states}
        members = []
        for name, member in record.members.items():
            each = known.get(name)
            members.append(
                pb.Member(
                    node=name,
                    weight=member.weight,
                    draining=member.draining,
                    address=str(known_members.addresses.get(name, "")),
                    control=controls.get(name, ""),
                    usable=each is not None and each.usable,
                    sent_bytes_per_s=0.0 if each is None else each.load,
                    free_share=0.0 if each is None else each.free,
                    location="" if each is None else shown_location(each.location),
                )
            )
        drained = [
            pb.Drained(
                node=name,
                moved=[pb.Moved(node=to, segments=segments, bytes=nbytes) for to, segments, nbytes in account.moved],
                lost_segments=account.lost[0],
                lost_bytes=account.lost[1],
            )
            for name, account in known_members.drained.items()
        ]
        return pb.GetClusterResponse(
            cluster=self._node.config.cluster, epoch=record.epoch, members=members, drained=drained
        )

    async def get_config(self, caller: Caller, message: pb.GetConfigRequest) -> pb.GetConfigResponse:
        """Each setting, its value and its source; secrets are masked."""
        digests = _digests(self._node.config)
        settings = [
            pb.Setting(name=name, value=value, source=source, digests=digests.get(name))
            for name, value, source in describe(self._node.config, self._node.origin)
        ]
        return pb.GetConfigResponse(settings=settings)

    async def explain(self, caller: Caller, message: pb.ExplainRequest) -> pb.ExplainResponse:
        """Return the tokens of a request that were found in the pool, and the reasons for those that were not."""
        check_name("request", message.request)
        answer = await self._bridge.explain(caller.target(message.tenant).name, message.request)
        if answer.funnel is None:
            return pb.ExplainResponse(names=answer.names)
        return pb.ExplainResponse(funnel=pb.Funnel(**answer.funnel.plain()))

    async def get_engines(self, caller: Caller, message: pb.GetEnginesRequest) -> pb.GetEnginesResponse:
        """The connected engines by tenant and layout."""
        connected = await self._bridge.call(self._node.engines.connected)
        engines = [
            pb.Engines(tenant=tenant, layout=layout_message(layout), engines=len(count), processes=count.total())
            for (tenant, layout), count in connected.items()
        ]
        return pb.GetEnginesResponse(engines=engines)

    async def get_activity(self, caller: Caller, message: pb.GetActivityRequest) -> pb.GetActivityResponse:
        """Hot prefixes and slow calls among the newest requests of the tenants that the caller may see."""
        recent = await self.recent.get()
        if not caller.admin:
            own = caller.own().name
            recent = [each for each in recent if each.tenant == own]
        return activity_message(recent, min(message.count or SHOWN, MAX_SHOWN))

    async def grant_page(self, caller: Caller, message: pb.GrantPageRequest) -> pb.GrantPageResponse:
        """Grant a browser the page, with what the caller may see."""
        if not 0 <= message.valid_s <= MAX_GRANT_S:
            raise ValueError(f"field 'valid_s' is {message.valid_s}; expected 0 to {MAX_GRANT_S:.0f} seconds")
        tenant = "" if caller.admin and not message.tenant else caller.target(message.tenant).name
        token = self._page_tokens.grant(tenant, message.valid_s or GRANT_S)
        return pb.GrantPageResponse(token=token, address=self._node.page_address)

    async def measure_peer(self, caller: Caller, message: pb.MeasurePeerRequest) -> pb.MeasurePeerResponse:
        """Measure the paths from another node to this one."""
        if not message.node or message.node == self._node.config.node:
            raise ValueError(f"field 'node' is {message.node!r}; expected the name of another node")
        max_bytes = min(message.max_bytes or MAX_BYTES, MAX_BYTES)
        max_s = min(message.max_s or MAX_S, MAX_S) if message.max_s >= 0 else MAX_S
        paths = await asyncio.to_thread(self._node.measurement.measure, message.node, max_bytes, max_s)
        return pb.MeasurePeerResponse(paths=[pb.Path(**each._asdict()) for each in paths])

    async def drain(self, caller: Caller, message: pb.DrainRequest) -> pb.DrainResponse:
        """Let a node leave."""
        node = "" if message.node == self._node.config.node else message.node
        self.awaited |= message.wait and not node
        await self._bridge.coroutine(lambda: self._node.membership.drain(node))
        return pb.DrainResponse()

    async def remove(self, caller: Caller, message: pb.RemoveRequest) -> pb.RemoveResponse:
        """Remove a node that is gone."""
        if not message.node:
            raise ValueError("field 'node' is empty; expected the name of a node")
        await self._bridge.coroutine(lambda: self._node.membership.remove(message.node))
        return pb.RemoveResponse()

    async def evict(self, caller: Caller, message: pb.EvictRequest) -> pb.EvictResponse:
        """Evict segments of this node."""
        tenant = caller.target(message.tenant).name
        what = message.WhichOneof("what")
        if (
            what is None
            or (what == "all" and not message.all)
            or (what == "segment_bytes" and not message.segment_bytes)
        ):
            raise ValueError(
                "an EvictRequest needs one of the fields 'keys', 'all' (true) and 'segment_bytes' (above 0)"
            )
        if what != "keys":
            return await self._evict(tenant, b"", message.segment_bytes)
        if not message.keys:
            raise ValueError("field 'keys' is empty; expected keys of segments")
        count = len(keys_of(message.keys))
        if count > MAX_KEYS:
            raise LimitReached(f"{count} segments; the limit of a message is {MAX_KEYS}")
        return await self._evict(tenant, message.keys, 0)

    async def _evict(self, tenant: str, keys: bytes, slot_bytes: int) -> pb.EvictResponse:
        """Evict segments of the tenant from memory and from the devices. A device that cannot carry it out now is
        emptied before it is used again."""
        evicted = kept = 0
        step = MAX_ORDERED * KEY_BYTES
        reached: set[int] | None = None
        for at in range(0, max(1, len(keys)), step):
            part = keys[at : at + step]
            done: EvictionDone = await self._bridge.ask(
                functools.partial(events.EvictRequested, tenant=tenant, keys=part, slot_bytes=slot_bytes)
            )
            evicted, kept = evicted + done.evicted, kept + done.kept
            reached = set(done.reached) if reached is None else reached.intersection(done.reached)
        unremoved = await self._bridge.call(lambda: self._node.disk.evicted(reached or set()))
        unrecorded = await self._bridge.coroutine(self._node.orders.save)
        unrecorded += await self._bridge.coroutine(self._node.cold.erased)
        return pb.EvictResponse(evicted=evicted, kept=kept, unremoved=unremoved, unrecorded=unrecorded)

    async def weights_changed(self, caller: Caller, message: pb.WeightsChangedRequest) -> pb.WeightsChangedResponse:
        """End the sessions of engines whose weights changed, and evict their segments."""
        tenant, digest = caller.target(message.tenant).name, message.weights_digest
        if not digest:
            raise ValueError("field 'weights_digest' is empty; expected the weights_digest of the engines' layout")
        check_name("digest", digest)
        sessions, sizes = await self._bridge.call(
            lambda: (self._node.engines.retire(tenant, digest), self._node.engines.layouts.sizes(tenant, digest))
        )
        # Recorded before anything is evicted: an engine of a daemon that is killed meanwhile is refused all the same.
        unrecorded = await self._bridge.coroutine(self._node.orders.save)
        evicted, unremoved = 0, dict[str, None]()
        for size in sizes:
            done = await self._evict(tenant, b"", size)
            evicted += done.evicted
            unremoved |= dict.fromkeys(done.unremoved)
            unrecorded = done.unrecorded or unrecorded
        return pb.WeightsChangedResponse(sessions=sessions, evicted=evicted, unremoved=unremoved, unrecorded=unrecorded)


def of_tenant(status: pb.GetStatusResponse, tenant: str) -> pb.GetStatusResponse:
    """The state of the node without the slots, counts, refused engines and streams of other tenants."""
    shown = pb.GetStatusResponse()
    shown.CopyFrom(status)
    del shown.pools[:], shown.tenants[:], shown.refused[:], shown.kv_events[:]
    shown.pools.extend(pool for pool in status.pools if pool.tenant == tenant)
    shown.tenants.extend(each for each in status.tenants if each.tenant == tenant)
    shown.refused.extend(each for each in status.refused if each.tenant == tenant)
    shown.kv_events.extend(each for each in status.kv_events if each.tenant == tenant)
    return shown


def _peers(states: Mapping[str, PeerState], now: float) -> Iterator[pb.Peer]:
    for name, each in states.items():
        yield pb.Peer(node=name, state=each.state, reason=each.reason, for_s=max(0.0, now - each.since))


def _disks(snapshot: Snapshot) -> Iterator[pb.Disk]:
    for number, each in enumerate(snapshot.disks):
        uses = [use for use in snapshot.disk_usage if use.device == number]
        yield pb.Disk(
            path=each.path,
            serving=each.serving,
            problem=each.problem,
            capacity_bytes=each.capacity_bytes,
            segments=sum(use.segments for use in uses),
            used_bytes=sum(use.nbytes for use in uses),
            lost_segments=each.lost,
        )


def _by_tenant(snapshot: Snapshot) -> list[pb.TenantCounters]:
    counted: dict[str, dict[str, int]] = {}
    for metric, values in snapshot.labelled.items():
        if metric.labels[0] == "tenant":
            for (tenant, *_), value in values.items():
                of_tenant = counted.setdefault(tenant, {})
                of_tenant[metric.name] = of_tenant.get(metric.name, 0) + value
    return [pb.TenantCounters(tenant=tenant, counters=values) for tenant, values in sorted(counted.items())]


def _digests(config: ServerConfig) -> dict[str, dict[str, str]]:
    """Digests of the secrets that must be equal on all nodes, by setting."""

    def digest(secret: bytes) -> str:
        # A secret has at least 16 random bytes, so that a digest does not help to find it.
        return hashlib.blake2b(secret, digest_size=8, person=b"tokenlake digest").hexdigest()

    return {
        "tenants": {tenant.name: digest(tenant.secret) for tenant in config.tenants},
        "cluster_secret": {str(place): digest(secret) for place, secret in enumerate(config.cluster_secret)},
    }
