"""One daemon: makes and connects the arena, the rules, the sockets and the threads, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tokenlake.config import Address, RuleSettings, ServerConfig, is_loopback, parse_address
from tokenlake.core import CoreConfig, NodeCore, events
from tokenlake.core.context import DRAIN_S
from tokenlake.core.events import Event
from tokenlake.core.instructions import AbortFetch, ReadRing, Record, Sealed, Stamp
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import ProtocolRefused, Unreachable
from tokenlake.identity import Incarnation, NodeId
from tokenlake.location import shown_location
from tokenlake.memory import Cursor
from tokenlake.memory.region import PAGE
from tokenlake.metrics import Level
from tokenlake.wire import supervision
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.peer import PeerHello, Purpose
from tokenlake.wire.slots import SlotRef, unpack_slots
from tokenlake_server.bulk.choice import open_transports
from tokenlake_server.bulk.receiver import BulkReceiver
from tokenlake_server.bulk.sender import BulkSender
from tokenlake_server.cold.tier import ColdTier
from tokenlake_server.control.node_parts import NodeParts
from tokenlake_server.disk.tier import DiskTier, disk_gauges
from tokenlake_server.engines.arena import Arena
from tokenlake_server.engines.connected_process import LOCK_S, kernel_has_pidfds
from tokenlake_server.engines.contents import Contents
from tokenlake_server.engines.listener import EngineListener, EngineSettings
from tokenlake_server.engines.query_engine import QueryEngine
from tokenlake_server.engines.regions import Regions, makers
from tokenlake_server.engines.slot_checker import SlotChecker
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.kept.memory import Kept
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.loop.driver import Driver
from tokenlake_server.loop.watchdog import Watchdog
from tokenlake_server.membership import MembershipState, open_membership, static_members
from tokenlake_server.metrics_page import (
    CERTIFICATE_BEGIN,
    CERTIFICATE_END,
    STARTED,
    UNPREPARED,
    MetricsServer,
    Snapshot,
)
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.certificates import CertificateFiles, Certificates
from tokenlake_server.peers.connections import Adopt, PeerConnections
from tokenlake_server.peers.handshake import PeerIdentity
from tokenlake_server.peers.measurement import PeerMeasurement
from tokenlake_server.peers.states import PeerState
from tokenlake_server.start.ring_follower import RingFollower
from tokenlake_server.start.standing_orders import StandingOrders
from tokenlake_server.start.start_errors import ModuleMissing

if TYPE_CHECKING:
    from tokenlake_server.control.server import ControlServer
    from tokenlake_server.nixl.transport import Nixl
    from tokenlake_server.tracing.export import Export

log = logging.getLogger(__name__)


def core_config(
    config: ServerConfig, incarnation: int, record: RingRecord | None = None, *, keep: bool = False
) -> CoreConfig:
    """The configuration of the rules that follows from the settings. `record`: the members at the start,
    without it those of `peers`. `keep`: does the memory outlive the daemon?"""
    return CoreConfig(
        node=config.node,
        incarnation=incarnation,
        ring=record or static_members(config).record,
        regions=config.regions,
        region_bytes=config.memory // config.regions // PAGE * PAGE,
        makers=makers(),
        made=False,
        quotas={tenant.name: tenant.quota for tenant in config.tenants},
        salt_quotas={tenant.name: tenant.salt_quota for tenant in config.tenants if tenant.salt_quota < 1},
        match_deadline_s=config.match_deadline_ms / 1e3,
        suspect_s=config.suspect_ms / 1e3,
        drain_s=config.drain_s or DRAIN_S,
        keep=keep,
        **{name: getattr(config, name) for name in RuleSettings.__struct_fields__},
    )


WALK_SLOTS = 1 << 16
"""Limit of the slots that one step of the search for segments in use examines when the daemon ends."""


class Daemon:
    """The daemon of a node, with its arena, rules, sockets and threads. Made on a running loop; it serves at once, and
    prepares its memory meanwhile. `close` releases everything."""

    def __init__(
        self,
        config: ServerConfig,
        arena: Arena,
        origin: Mapping[str, str] = MappingProxyType({}),
        report: Callable[[int, int], None] = lambda done, total: None,
        kept: Kept | None = None,
    ) -> None:
        """`origin`: the source of each setting. `report`: as of `running.run`. `kept`: the memory of the daemon before,
        in `arena`, and what keeps that of this one."""
        loop = asyncio.get_running_loop()
        incarnation = time.time_ns()
        self._admin = AdminThread()
        """The thread in which gRPC runs for the membership and for the control plane."""
        self.membership = open_membership(config, incarnation, loop, self._admin)
        rules = core_config(config, incarnation, self.membership.members.record, keep=kept is not None)
        core = NodeCore(rules)
        self._loop = loop
        self._arena = arena
        self._kept = kept
        self._tracing = _tracing(config)
        self._started = time.time()
        self.driver = Driver(core, loop, self._failed)
        core.start(self.driver.now)
        self.watchdog: Watchdog = getattr(loop, "watchdog", None) or Watchdog()
        self.watchdog.use(core.counters)
        self.driver.wrap(self.watchdog.noting, lambda sink: sink)
        self.driver.carry_out(Stamp, lambda stamp: arena.stamp(unpack_slots(stamp.slots)))
        self.driver.carry_out(Record, kept.record if kept is not None else lambda order: None)
        self.driver.carry_out(Sealed, kept.sealed if kept is not None else lambda order: None)
        self.driver.carry_out(ReadRing, lambda order: self.membership.refresh())
        certificates = self._certificates = _certificates(config)
        secrets = () if certificates else config.cluster_secret
        identity = PeerIdentity(
            config.node,
            incarnation,
            secrets,
            config.cluster,
            tuple(map(str, config.bulk_listen)),
            _control_address_of(config),
            shown_location(config.location),
        )
        self._control_address = _control_address_of(config)
        addresses = PeerAddresses(
            self.membership.members.addresses,
            loopback_only=certificates is None and not config.unencrypted_beyond_loopback,
        )
        self._transports = open_transports(config, incarnation, arena)
        self.regions = Regions(arena, self.driver, self._transports, loop, report, kept)
        self.contents = _contents(config, self._admin, loop, self.driver)
        self.senders = BulkSender(arena, self.driver, self._transports, self.contents)
        adopt: dict[Purpose, Adopt] = {"bulk": self.senders.adopt, "query": self._adopt_query}
        self.checker = SlotChecker(arena, self.driver)
        self.peers = PeerConnections(
            identity,
            parse_address(config.listen),
            addresses,
            self.driver,
            loop,
            adopt,
            certificates,
            config.bulk_listen,
        )
        self.receivers = BulkReceiver(
            identity, addresses, arena, self.driver, self.peers.new_keys, self._transports, self.contents
        )
        if self._transports.nixl is not None:
            self._connect_nixl(self._transports.nixl)
        tenants = Tenants(config)
        self.orders = StandingOrders(_orders_file(config), [disk.path for disk in config.disk], tenants.count)
        self.disk = DiskTier(config, arena, self.driver, loop, self._abort_fetch, self.contents, self.orders)
        self.cold = ColdTier(
            config, arena, self.driver, loop, self.contents, tenants, lambda: self.orders.evicted / 1e9
        )
        # Behind the disk tier, which locks its directories.
        self.orders.load()
        self.peers.introductions.on_proven = self.membership.proven
        self.peers.on_stranger = lambda node: self.membership.refresh()
        self.peers.states.rings_from(lambda: _other_rings(core.ring_states()))
        self.metrics = (
            MetricsServer(parse_address(config.metrics), loop, self.snapshot, config.node, _aliases(config))
            if config.metrics
            else None
        )
        start = supervision.Start(config.socket, config.node, tenants.query_credential, tenants.count)
        self.query_engine = (
            QueryEngine(start, identity, addresses, loop, self.peers.new_keys, log_objects=config.log_format == "json")
            if config.query_engine
            else None
        )
        # The local socket is created late, so that a daemon that cannot start leaves no file of a socket behind.
        self.engines = EngineListener(
            EngineSettings(
                NodeId(config.node),
                Incarnation(incarnation),
                Path(config.socket),
                config.max_sessions,
                config.memory,
                config.lease_s,  # engines derive the interval of their heartbeats from it
            ),
            tenants,
            arena,
            self.driver,
            loop,
            self._connect_query,
            self.contents,
            self.orders,
            kept,
        )
        self.regions.on_closed = self.engines.region_closed
        if self._tracing is not None:
            self._observe(self._tracing)
        log.info(
            "this kernel reports the end of every engine's process (SO_PEERPIDFD)"
            if kernel_has_pidfds()
            else "this kernel has no SO_PEERPIDFD (Linux 6.5): a file lock reports the end of engines in other "
            f"PID namespaces, within {LOCK_S:.0f} s"
        )
        if kept is not None:
            kept.begin(self.driver, loop, incarnation, self.orders.evicted)
            self.orders.on_evicted = kept.followed
            if kept.nbytes:
                self.regions.adopted()
        self.driver.start()
        self.control: ControlServer | None = None
        try:
            if (server := _control_server(config)) is not None:
                measurement = PeerMeasurement(identity, addresses, self.peers.new_keys)
                parts = NodeParts(
                    config,
                    origin,
                    self.driver,
                    self.engines,
                    self.membership,
                    tenants,
                    self.snapshot,
                    self.peers.states.all,
                    self._controls,
                    measurement,
                    self.orders,
                    self.disk,
                    self.cold,
                    str(self.metrics.address) if self.metrics is not None else "",
                )
                self.control = server(parts, self._admin, loop)
                if self.metrics is not None:
                    self.metrics.page.source = self.control.page
        except BaseException:
            self.engines.close()
            raise
        encrypted = certificates is not None or config.unencrypted_beyond_loopback
        self.ring = RingFollower(self.membership, self.driver, self.peers, self.receivers, loop, encrypted=encrypted)
        if self.control is not None:
            self.ring.account_read = self.control.account_read
        own = parse_address(config.listen)
        advertised = parse_address(config.advertise) if config.advertise else Address(own.host, self.peers.address.port)
        self.membership.start(advertised, self.ring.follow)
        self.disk.start()
        self.cold.start()

    def _abort_fetch(self, order: AbortFetch) -> None:
        self.cold.abort(order.fetch)
        self.receivers.abort(order)

    def snapshot(self) -> Snapshot:
        """All counters and gauges at this moment, for the metrics page. Called on the loop."""
        peers, unproven = self.peers.states.all(), self.peers.introductions.states.all()
        disks, membership = self.disk.states, _with_refusals(self.membership.state, unproven)
        counts = self.engines.engines, self.engines.processes
        snapshot = Snapshot(self.driver.core, *counts, peers, membership, self.query_engine, disks, unproven)
        snapshot.streams = self.contents.streams()
        snapshot.gauges += self.watchdog.gauges() + self.contents.gauges()
        snapshot.gauges += [
            *self.engines.layouts.gauges(),
            *self.senders.gauges(),
            *self.orders.gauges(),
            *disk_gauges(disks, snapshot.disk_usage, self.driver.core.disk_budgets()),
        ]
        snapshot.cold = self.cold.state
        snapshot.gauges += self.cold.gauges()
        if self._kept is not None:
            snapshot.gauges += self._kept.gauges()
        if self._transports.nixl is not None:
            snapshot.gauges += self._transports.nixl.gauges()
        if self.control is not None:
            snapshot.gauges += self.control.gauges()
        if self._tracing is not None:
            snapshot.gauges += self._tracing.gauges()
        snapshot.gauges += [Level(STARTED, (), self._started), Level(UNPREPARED, (), self.regions.unprepared)]
        if self._certificates is not None:
            valid = self._certificates.current
            snapshot.gauges.append(Level(CERTIFICATE_BEGIN, (), valid.begin.timestamp()))
            snapshot.gauges.append(Level(CERTIFICATE_END, (), valid.end.timestamp()))
        return snapshot

    def _controls(self) -> dict[str, str]:
        return {**self.peers.controls, self.driver.core.config.node: self._control_address}

    def _connect_query(self, tenant: str, layout: bytes) -> socket.socket:
        if self.query_engine is None:
            raise Unreachable("this node has no query engine, because its setting 'query_engine' is false")
        return self.query_engine.connect_engine(tenant, layout)

    def _adopt_query(self, sock: socket.socket, hello: PeerHello, keys: RecordKeys | None) -> None:
        if self.query_engine is None:
            sock.close()
        else:
            self.query_engine.adopt(sock, hello, keys)

    def _failed(self, event: Event, error: Exception) -> None:
        """Close the connection that sent an event which the rules did not complete because of `error`."""
        if isinstance(error, ValueError):
            log.warning("an event was refused: %s", error, extra={"kind": "refused"})
        else:
            log.error("the rules failed on %s", type(event).__name__, exc_info=error, extra={"kind": "failed"})
            error = ProtocolRefused("the daemon failed on this request; its log has the error")
        asked = isinstance(event, events.LocateRequested | events.EvictRequested) or (
            isinstance(event, events.ExplainRequested) and event.connection < 0
        )
        if asked and self.control is not None:
            self.control.refuse(event, error)
        elif isinstance(event, events.Requested | events.Joined | events.ExplainRequested):
            self.engines.refuse(event.connection, error)
        elif isinstance(event, events.PeerSent):
            self.peers.refuse(event.node, error)
        elif isinstance(event, events.PullRequested):
            self.senders.refuse(event.stream)

    def _observe(self, export: Export) -> None:
        """Make spans of traced requests."""
        from tokenlake_server.tracing.observer import Observer  # only where asked for

        observer = Observer(export, self.driver.core, self.peers.tell)
        self.driver.wrap(observer.watching, lambda sink: sink)
        self.engines.on_traced = observer.traced
        self.peers.on_traced = observer.traced_by_peer

    def _connect_nixl(self, nixl: Nixl) -> None:
        """Exchange with other nodes how memory is read, over the control connections."""

        def introduce(*nodes: str) -> None:
            for node in nodes or self.peers.connected:
                self.peers.tell(node, nixl.introduction)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(introduce)

        nixl.tell = tell
        self.peers.on_connected = introduce
        self.peers.on_lost = nixl.lost
        self.peers.on_memory_agent = nixl.heard
        nixl.start(self.receivers.connections)

    async def close(self) -> None:
        """Stop the daemon: write memory out to the disk tier, accept no more requests, end the threads and the query
        engine, leave memory to the next daemon or give it back. A part that cannot be closed is logged, and the others
        are closed all the same."""
        if not self.ring.left.is_set():
            await _end("memory was not saved", lambda: self.disk.save(cold=self.cold.serving))
        await _end("the disk tier was not stopped", self.disk.stop)
        await _end("the cold tier was not stopped", self.cold.stop)
        self.regions.stop()
        if self._kept is not None:
            await _end("the check of memory was not ended", self._kept.stop)
        await _end("the changes of the members were not ended", self.ring.close)
        if self.control is not None:
            await _end("the control plane was not closed", self.control.close)
        await _end("the KV events were not closed", self.contents.close)
        await _end("the membership was not closed", self.membership.close)
        await _end_thread("the admin thread was not ended", self._admin.close)
        await _end("the local socket was not closed", self.engines.close)
        if self.query_engine is not None:
            await _end("the query engine was not ended", self.query_engine.close)
        await _end("the connections with other nodes were not closed", self.peers.close)
        if self.metrics is not None:
            await _end_thread("the metrics page was not closed", self.metrics.close)
        await _end_thread("the fetches were not ended", self.receivers.close)
        await _end_thread("the bulk connections of other nodes were not closed", self.senders.close)
        if self._transports.nixl is not None:
            await _end_thread("NIXL was not closed", self._transports.nixl.close)
        await _end_thread("the check of slots was not ended", self.checker.close)
        await _end_thread("the disk tier was not closed", self.disk.close)
        await _end_thread("the cold tier was not closed", self.cold.close)
        if self._tracing is not None:
            await _end_thread("the spans were not sent", self._tracing.close)
        self._arena.stop()
        await _end("the memory of regions was not left", self.regions.close)
        await _end("the memory was not left to the next daemon, or given back", self._leave_memory)
        await _end("the timers were not ended", self.driver.stop)

    async def _leave_memory(self) -> None:
        """The end of a daemon that will be started again leaves its memory to the next one."""
        kept, left = self._kept, list[int]()
        if kept is not None:
            if not self.ring.left.is_set() and await kept.hand_over():
                left = kept.left
            else:
                await kept.give_up()
            kept.close()
        if len(left) < len(self._arena.numbers):
            await asyncio.to_thread(self._arena.free_pages, self._slots_in_use(), left)

    def _slots_in_use(self) -> dict[int, list[tuple[SlotRef, int]]]:
        """By region, the slots (with their size) that engines may still read or write after the end of the daemon."""
        used: dict[int, list[tuple[SlotRef, int]]] = {}
        cursor: Cursor | None = Cursor()
        while cursor is not None:
            segments, cursor = self.driver.core.store.walk(cursor, WALK_SLOTS)
            for segment in segments:
                if segment.pins:
                    used.setdefault(segment.place.region, []).append((segment.place, segment.slot_bytes))
        return used


async def _end(problem: str, close: Callable[[], Awaitable[object] | None]) -> None:
    """Call `close` and wait for it. `problem`: the message of the log where that raises."""
    try:
        waiting = close()
        if waiting is not None:
            await waiting
    except Exception:
        log.exception(problem)


async def _end_thread(problem: str, close: Callable[[], object]) -> None:
    """As `_end`, with `close` called in a thread."""
    await _end(problem, lambda: asyncio.to_thread(close))


def _control_address_of(config: ServerConfig) -> str:
    """The address at which other machines reach the control plane; empty if there is none, or its port is not known."""
    if not config.control or not parse_address(config.control).port:
        return ""
    host, port = parse_address(config.control)
    if host in ("0.0.0.0", "::"):
        host = parse_address(config.advertise or config.listen).host
    return str(Address(host, port))


def _control_server(config: ServerConfig) -> type[ControlServer] | None:
    """The class of the control plane; None where it is turned off."""
    if not config.control and not config.control_socket:
        return None
    from tokenlake_server.control.server import ControlServer  # only where asked for: gRPC takes memory

    return ControlServer


def _tracing(config: ServerConfig) -> Export | None:
    """The way of spans to the collector; None without the setting `otlp`."""
    if not config.otlp:
        return None
    try:
        from tokenlake_server.tracing.export import Export
    except ModuleNotFoundError as error:
        raise ModuleMissing("otlp", config.otlp, error.name, "tracing") from error
    return Export(config.otlp, config.node, config.cluster)


def _orders_file(config: ServerConfig) -> Path:
    """The file with the orders of operators that outlive the daemon. Beside the local socket it outlives the engines
    that are connected."""
    if config.state_directory:
        return Path(config.state_directory, f"orders-{config.node}")
    return Path(f"{config.socket}.orders")


def _contents(config: ServerConfig, thread: AdminThread, loop: asyncio.AbstractEventLoop, driver: Driver) -> Contents:
    """The streams of KV events; where none is set, the daemon wants no contents."""
    if not config.kv_events:
        return Contents()
    from tokenlake_server.kv_events import KvEvents  # only where asked for

    return KvEvents(config, thread, loop, driver)


def _aliases(config: ServerConfig) -> dict[str, str]:
    """The names that the metrics page shows in place of tenants' names; none where it may show these."""
    if config.metrics_tenants or is_loopback(parse_address(config.metrics).host):
        return {}
    return {tenant.name: str(number) for number, tenant in enumerate(config.tenants)} or {"default": "0"}


def _with_refusals(state: MembershipState, unproven: Mapping[str, PeerState]) -> MembershipState:
    """The state of the membership; where no member has proven this node, its problem says what each of them answers."""
    found = [f"'{name}' {each.state}: {each.reason}" for name, each in unproven.items() if each.state != "connected"]
    return state if state.known or not found else replace(state, problem="; ".join([state.problem, *found]))


def _other_rings(states: Mapping[str, str]) -> dict[str, str]:
    """The peers whose members differ from those of this node, and how."""
    text = (
        "its members or their sizes differ from those of this node, so that segments of each are not found at the "
        "other: give both the same 'peers', with the same sizes"
    )
    return {name: text for name, state in states.items() if state == "differs"}


def _certificates(config: ServerConfig) -> Certificates | None:
    if not config.certificate:
        if config.unencrypted_beyond_loopback:
            log.warning("connections with other nodes are not encrypted: 'unencrypted_beyond_loopback' is set")
        return None
    files = CertificateFiles(Path(config.certificate), Path(config.key), Path(config.ca))
    return Certificates(files, config.cluster, config.node)
