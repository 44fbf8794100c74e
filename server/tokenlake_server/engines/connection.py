"""One connection of an engine's process to the local socket: its identity, and the limits of its requests.

::

    accept -> Hello -> identified -> the rules create or join a session -> joined -> closed -> the process is dead
                                                                                       |
                                                              (a process that maps the arena may outlive its socket)
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence

import msgspec

from tokenlake.config import format_size
from tokenlake.errors import LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES, probe
from tokenlake.memory.region import stride_of
from tokenlake.opaque_layout import AnyLayout, decode_layout
from tokenlake.wire import agree, engine, pack_frame
from tokenlake.wire.engine import MAX_CHANGED, MAX_FETCHED, MAX_KEYS
from tokenlake_server.engines.connected_process import ConnectedProcess
from tokenlake_server.engines.kept_bytes import CONNECTION_BYTES, Account, KeptBytes
from tokenlake_server.engines.refused import Reason, refused_for
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.loop.frame_connection import FrameConnection
from tokenlake_server.loop.loop_share import LoopShare

HELLO_S = 10.0
"""Seconds after which a connection without a `Hello` is closed."""
PAUSE_BYTES = 512 << 10
"""Bytes of unread answers beyond which no further request of an engine's process is handled."""
HELLO_BYTES = 64 << 10
"""Limit of the bytes of a frame until the `Hello`, which is the first one, is accepted."""
KEPT_PER_REQUEST, KEPT_PER_KEY = 2048, 384
"""Bytes that are charged for an unanswered request, and for each segment that it names: the state of a match that
waits."""
MAX_IN_FLIGHT = 1024
"""Limit of the unanswered requests on one connection of an engine."""


class EngineConnection:
    """The connection of one engine process. Used on the control loop only. Owns the socket and the process's pidfd."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        share: LoopShare,
        on_frame: Callable[[EngineConnection, bytes], None],
        on_closed: Callable[[EngineConnection, str], None],
    ) -> None:
        """`on_frame(connection, body)` is called for each frame, and returns the rest of its work, if any (as of
        `FrameConnection`); `on_closed(connection, reason)` once, when the socket is closed."""
        self.number = number
        self.origin = secrets.randbits(63)
        """The number by which the process names itself when it resumes: that of its first connection, kept by each
        connection that resumes another. The process may have lost the replies that named those in between. No other
        process can guess the number: in foreign PID namespaces all processes have the pid 0."""
        self.process = ConnectedProcess(sock)
        self.hello: engine.Hello | None = None
        """The first message (`Hello`) of the engine's process; None until the process has proven its tenant and
        layout."""
        self.layout: AnyLayout | None = None
        self.tenant = ""
        """The tenant, once the process has proven it; also of a process that is then refused."""
        self.secret = b""
        self.query_engine = False
        """True for a process of this node's query engine."""
        self.session = 0
        self.refused_memory_at = 0.0
        """The time of the loop since which stores get no slot, for want of memory for slots of this size at the tenant;
        0 if the last one got some."""
        self.without_memory = False
        """True once that has lasted for a while."""
        self.joined = False
        """True: the engine's process belongs to a session of the rules."""
        self.maps = False
        """True: the engine's process was given a descriptor of the arena, over this connection or over one that this
        one resumes."""
        self.opened: set[int] = set()
        """Regions of which the process was given a descriptor, and which have not been closed since."""
        self.locked = False
        """True once the process has locked its file (`ConnectedProcess.lock`)."""
        self.survivor = 0
        """The number of the process at the daemon before, if it continues what it began there; else 0."""
        self.regranted = False
        """True once it has said what it holds of that."""
        self._loop = loop
        self._version = 0
        self._account: Account | None = None
        """The bytes that the connection makes the daemon keep, once its tenant is known."""
        self._in_flight: dict[int, int] = {}
        """The bytes that are charged for each unanswered request, by its id."""
        self._frames: FrameConnection | None = FrameConnection(
            loop,
            sock,
            HELLO_BYTES,
            lambda body: on_frame(self, body),
            lambda reason: self._on_closed(reason, on_closed),
            lambda error: self.refuse(0, error),
            pause_bytes=PAUSE_BYTES,
            charge=self._charge,
        )
        self.share = share
        self._deadline = loop.call_later(HELLO_S, self.close, f"no Hello within {HELLO_S:.0f} s")

    def _on_closed(self, reason: str, on_closed: Callable[[EngineConnection, str], None]) -> None:
        self._frames = None
        self._deadline.cancel()
        on_closed(self, reason)

    @property
    def version(self) -> int:
        """The protocol version that both sides use; 0 before `identify`."""
        return self._version

    @property
    def share(self) -> LoopShare | None:
        """The time of the loop that this connection shares with others of its tenant, or with others that have not
        sent a `Hello`; None once the socket is closed."""
        return None if self._frames is None else self._frames.share

    @share.setter
    def share(self, share: LoopShare) -> None:
        if self._frames is not None:
            self._frames.share = share

    def check_lock(self) -> bool:
        """Look whether the process has locked its file, and record that in `locked`. Returns True if it has, or if it
        was given none because the daemon has a pidfd."""
        if self.process.lock is None:
            return self.process.pidfd is not None
        self.locked = self.locked or self.process.holds_lock
        return self.locked

    # -- replies

    def send(self, message: engine.EngineReply, descriptors: Sequence[int] = ()) -> None:
        """Send a reply to the engine's process; nothing once the socket is closed. The caller continues to own
        `descriptors`."""
        if self._frames is not None:
            self._frames.send(pack_frame(message), descriptors)

    def fail(self, request: int, kind: type[TokenLakeError], reason: str) -> None:
        """Reply to the engine's process that one request failed. The connection stays open."""
        self.send(engine.Failed(request, kind.__name__, reason))

    def refuse(self, request: int, error: Exception) -> None:
        """Reply to a request of the engine's process with the error, and close the socket."""
        self.fail(request, type(error) if isinstance(error, TokenLakeError) else ProtocolRefused, str(error))
        self.close(f"refused: {error}")

    def close(self, reason: str) -> None:
        """Close the connection to the engine's process. Idempotent."""
        if self._frames is not None:
            self._frames.close(reason)

    # -- limits

    def _charge(self, nbytes: int) -> None:
        if self._account is not None:
            self._account.charge(nbytes)

    def close_account(self) -> None:
        """Charge nothing for this connection any more. To be called when the daemon keeps nothing of it."""
        if self._account is not None:
            self._account.close()

    # -- requests

    def admit(self, message: engine.EngineRequest) -> str:
        """Count a request of the engine's process that has a reply and is about to be passed to the rules; it is
        unanswered until `answer`. Returns a text that names the limit that the request exceeds; it is not counted then.
        Empty: the request is within all limits."""
        # A process that has not joined, which may only ask for an explanation, has one request at a time.
        limit = MAX_IN_FLIGHT if self._account is not None else 1
        if len(self._in_flight) >= limit:
            return f"limit 'max_in_flight' of {limit} unanswered requests is reached"
        if reason := keys_over_limit(message):
            return reason
        number = getattr(message, "id", 0)
        if number in self._in_flight:
            return f"request {number} is not answered yet; another request cannot have the same id"
        cost = KEPT_PER_REQUEST + KEPT_PER_KEY * _segments(message)
        try:
            self._charge(cost)
        except LimitReached as error:
            return str(error)
        self._in_flight[number] = cost
        return ""

    def answer(self, message: engine.EngineReply) -> None:
        """Send the rules' answer to a request of the engine's process."""
        self._charge(-self._in_flight.pop(message.id, 0))
        self.send(message)
        if isinstance(message, engine.Failed) and not self.joined:
            self.close(f"refused: {message.reason}")

    # -- identity

    def identify(self, hello: engine.Hello, tenants: Tenants, memory: int) -> None:
        """Take tenant, layout and protocol version from a `Hello`. Raises `EngineRefused` when the daemon does not
        serve this process."""
        with refused_for(Reason.VERSION):
            version = agree(hello.oldest_version, hello.newest_version)
        allowed = tenants.user(self.process.uid) != -1
        with refused_for(Reason.TOKEN if allowed and hello.token is not None else Reason.UID):
            tenant = tenants.identify(self.process.uid, hello.token)
        # The engine is sent it; msgspec refuses to encode a `Secret`.
        self.tenant, self.secret = tenant.name, bytes(tenant.secret)
        self.query_engine = tenants.is_query_engine(hello.token)
        with refused_for(Reason.LAYOUT):
            layout = decode_layout(hello.layout)
        with refused_for(Reason.PROBE):
            if hello.probe != probe(engine.PROBE_SECRET, layout.fingerprint()):
                raise ProtocolRefused(
                    "the probe hash differs: client and daemon compute different keys for the same prefix; "
                    "install the same version of tokenlake on both sides"
                )
        with refused_for(Reason.MEMORY):
            if stride_of(layout.segment_bytes) > memory:
                raise LimitReached(
                    f"one segment of this layout takes {layout.segment_bytes} bytes, more than the daemon's memory of "
                    f"{format_size(memory)}; raise its setting 'memory'"
                )
        # Of the `Hello` only the numbers are used from now on: its layout and token are not kept.
        self.hello = msgspec.structs.replace(hello, layout=b"", probe=b"", token=None)
        self.layout, self._version = layout, version

    def open_account(self, kept: KeptBytes) -> None:
        """Charge the tenant of this connection for the bytes that the daemon keeps for it, from now on. Raises
        `LimitReached`."""
        assert self.layout is not None
        account = Account(kept, self.tenant)
        account.charge(CONNECTION_BYTES + len(self.layout.encode()))
        self._account = account
        if self._frames is not None:
            self._frames.max_frame = engine.MAX_FRAME

    def in_session(self, session: int) -> engine.Hello:
        """The process named a session of an earlier daemon: it has the number `session` here, or begins anew (0)."""
        assert self.hello is not None
        resume = self.hello.resume if session else 0
        self.hello = msgspec.structs.replace(self.hello, session=session, resume=resume)
        return self.hello

    def continue_from(self, survivor: int, lock: int) -> None:
        """The process continues what it began at the daemon before, where its number was `survivor`, and holds the lock
        on the file, which this connection owns from now on."""
        self.process.lock = lock
        self.locked = self.maps = True
        self.survivor = self.origin = survivor

    def welcome(self, session: int, resumed: EngineConnection | None) -> int:
        """Record that the process has joined `session`. `resumed`: the connection whose leases and reservations the
        rules handed to this one. Returns the protocol version that both sides use."""
        self.joined = True
        self.session = session
        if resumed is not None:
            self.maps, self.origin = resumed.maps, resumed.origin
            self.opened |= resumed.opened
            self.locked, self.survivor, self.regranted = resumed.locked, resumed.survivor, resumed.regranted
        self._deadline.cancel()
        return self._version


_WITH_KEYS = (engine.Match, engine.Prepare, engine.Hint, engine.MarkInFlight, engine.Prefetch, engine.Unpin)


def keys_over_limit(message: engine.EngineRequest) -> str:
    """A text about the limit that the number of segments in a request exceeds; empty when the number is within the
    limit."""
    keys = _segments(message)
    if isinstance(message, engine.Prepare | engine.Hint | engine.Unpin):
        name, limit = "max_changed", MAX_CHANGED
    elif isinstance(message, engine.Fetch | engine.Prefetch):
        name, limit = "max_fetched", MAX_FETCHED
    else:
        name, limit = "max_keys", MAX_KEYS
    return f"{keys} segments in one request; limit '{name}' is {limit}" if keys > limit else ""


def _segments(message: engine.EngineRequest) -> int:
    """The number of segments that a request names."""
    if isinstance(message, _WITH_KEYS):
        return len(message.keys) // KEY_BYTES
    return max(0, message.stop - message.start) if isinstance(message, engine.Fetch) else 0
