"""One connection to one life of a daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.identity import Incarnation, SessionId, TenantId
from tokenlake.keys import probe
from tokenlake.layout import Layout
from tokenlake.wire import engine
from tokenlake.wire.slots import SLOT_BYTES
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION
from tokenlake_client.channel import Channel, Pending
from tokenlake_client.regions import Mapping, Regions

__all__ = ["STORE_S", "Link", "open_link"]

R = TypeVar("R")

MAX_SECRET_BYTES = 64
"""The longest key of blake2b."""
CONNECT_S = 5.0
LOCAL_S = 0.250
"""For calls that the daemon answers from its own memory."""
STORE_S = 2.0
"""For those that store: an engine stores behind its own back, and on a busy machine a daemon may get no turn for
longer than an engine could wait."""


class Link:
    """A channel and what the daemon said in its welcome. Leases and writes keep theirs, so that a slot number is never
    looked up in the memory of a daemon that started later."""

    def __init__(self, channel: Channel, welcome: engine.Welcome) -> None:
        self.channel = channel
        self.incarnation = Incarnation(welcome.incarnation)
        self.session = SessionId(welcome.session)
        self.connection = welcome.connection
        self.node = welcome.node
        self.tenant = TenantId(welcome.tenant)
        self.secret = welcome.secret
        self.heartbeat_s = welcome.heartbeat_s
        self.regions = Regions(self._open_region)

    @property
    def life(self) -> tuple[Incarnation, SessionId, int]:
        """Which session of which daemon, and as which of its processes: what was granted in one is nothing in
        another."""
        return self.incarnation, self.session, self.connection

    def forget(self) -> None:
        """Unmap what no array lies in."""
        self.regions = Regions(self._open_region)

    def call(
        self, make: Callable[[int], engine.EngineRequest], expected: type[R], deadline_s: float | None = None
    ) -> R:
        """As `Channel.call`, for a reply of one kind; None: a call that the daemon answers from its own memory."""
        return self.expect(self.channel.call(make, LOCAL_S if deadline_s is None else deadline_s), expected)

    @staticmethod
    def expect(reply: engine.EngineReply, expected: type[R]) -> R:
        """`reply` as what it must be, of fields that fit each other. Raises `ProtocolRefused`."""
        if not isinstance(reply, expected):
            raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}, not {expected.__name__}")
        if not _adds_up(reply):
            raise ProtocolRefused(f"the fields of a {expected.__name__} do not add up")
        return reply

    def wait(self, pending: Pending, deadline_s: float | None = None) -> engine.EngineReply:
        """The reply; None: to a call that the daemon answers from its own memory."""
        return self.channel.wait(pending, LOCAL_S if deadline_s is None else deadline_s)

    def wait_while_alive(self, pending: Pending) -> engine.EngineReply:
        """For a deadline that only the daemon knows: wait for as long as it answers heartbeats."""
        while True:
            reply = self.channel.poll(pending, LOCAL_S)
            if reply is not None:
                return reply
            try:
                self.call(engine.Heartbeat, engine.HeartbeatReply)
            except TokenLakeError:
                self.channel.drop(pending)
                raise

    def _open_region(self, region: int, write: bool) -> Mapping:
        pending = self.channel.begin(lambda number: engine.OpenRegion(number, region, write))
        reply = self.expect(self.channel.wait(pending, STORE_S if write else LOCAL_S), engine.Region)
        if pending.descriptor is None:
            raise ProtocolRefused(f"the daemon sent no descriptor of region {region}")
        try:
            return Mapping(pending.descriptor, reply.region_bytes, reply.slot_bytes, write=write)
        except (OSError, OverflowError, ValueError) as error:
            raise ProtocolRefused(f"region {region} is not what the daemon says: {error}") from error


def _adds_up(reply: engine.EngineReply) -> bool:
    """Who reads it takes memory for its hits, and looks at one slot per code."""
    match reply:
        case engine.Matched():
            return reply.hits * SLOT_BYTES == len(reply.slots) <= len(reply.codes) * SLOT_BYTES
        case engine.Fetched() | engine.Prepared():
            return len(reply.slots) == len(reply.codes) * SLOT_BYTES
        case engine.Welcome():
            return len(reply.secret) <= MAX_SECRET_BYTES
    return True


def open_link(
    socket: Path | None,
    daemon_uid: int | None,
    layout: Layout,
    credential: str | None,
    on_end: Callable[[], None],
    session: SessionId,
    resume: int = 0,
    incarnation: int = 0,
) -> Link:
    """Connect and say hello. `socket`, `daemon_uid`: as of `Pool.connect`.

    `session` 0 opens a new one; `resume`: `Link.connection` of the former, or 0; `incarnation`: of the daemon that
    named these two, 0 when it is not known; `on_end` is called when the connection breaks.

    Raises `Unreachable`, `ListenerUntrusted`, `LayoutRefused`, `CredentialRefused`, `ProtocolRefused`, `LimitReached`.
    """
    channel = Channel(socket, on_end, daemon_uid)
    try:
        welcome = channel.call(
            lambda number: engine.Hello(
                number,
                OLDEST_VERSION,
                PROTOCOL_VERSION,
                layout.encode(),
                probe(engine.PROBE_SECRET, layout.fingerprint()),
                credential,
                session,
                resume,
                incarnation,
            ),
            CONNECT_S,
        )
        link = Link(channel, Link.expect(welcome, engine.Welcome))
        if Link.expect(welcome, engine.Welcome).probe != probe(link.secret, layout.fingerprint()):
            raise ProtocolRefused(
                "the daemon's probe hash is another one: both sides hash the same prefix to different keys; "
                "install the same version of tokenlake on both"
            )
    except TokenLakeError:
        channel.close()
        raise
    channel.max_frame = Link.expect(welcome, engine.Welcome).max_frame
    return link
