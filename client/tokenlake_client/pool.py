"""Pool: the blocking client that an engine imports."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.keys import Prefix, TokenIds, root_key
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.slots import join_keys
from tokenlake_client.books import Books
from tokenlake_client.heart import Heart, Wake
from tokenlake_client.lease import Lease, PendingBeat, PendingMatch, Reading
from tokenlake_client.link import STORE_S, Link, open_link
from tokenlake_client.queries import QUERY_S, VIEW_S, Queries, QueryBuffer, Ticket, View
from tokenlake_client.transfers import LayerCache, Transfer
from tokenlake_client.write import Reservation, Source, Write

__all__ = ["Pool"]

log = logging.getLogger(__name__)

MATCH_S = 0.020
RETRY_S = 0.002
HINTED = 1024
"""Segments that one word, or claim, is about: some 32 KiB, below every daemon's bound on a frame."""
STORE_WINDOW = 32
"""Segments that `store_all` has reserved at a time, so that one prompt does not fill the write budget."""


class Pool:
    """One process of a session at its node's daemon. Usable from several threads.

    A daemon that dies is reconnected to in the background; until then calls raise `Unreachable` at once, and
    what was leased is gone (arrays handed out stay readable and right). A daemon that freezes costs one
    deadline; further calls raise `DeadlinePassed` at once until it answers.
    """

    def __init__(
        self,
        socket: Path | None,
        layout: Layout,
        credential: str | None,
        session: SessionId,
        verify: bool,
        daemon_uid: int | None,
    ) -> None:
        """Use `connect`."""
        layout.check()
        self.layout = layout
        self._process = os.getpid()
        wake = Wake()
        connect = partial(open_link, socket, daemon_uid, layout, credential, wake)
        self._books = Books(connect(session))
        # Leases and writes refer to it, and nothing that it refers to refers to them.
        self._reading = Reading(self._books, layout, verify)
        self._heart = Heart(self._books, connect, wake, self._reading)
        self._heart.start()
        self._queries = Queries(self._books, layout)
        self._putting = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-put")
        self._name = secrets.token_hex(4)
        self._requests = itertools.count(1)

    @classmethod
    def connect(
        cls,
        socket: str | Path | None,
        layout: Layout,
        credential: str | None = None,
        *,
        session: SessionId | None = None,
        verify: bool = False,
        daemon_uid: int | None = None,
    ) -> Pool:
        """Join the daemon at `socket`; None: where a daemon of this user, or of the system, listens by default.

        `credential`: a token of the tenant; without one the daemon goes by uid. `session`: join an engine's
        session that another process opened. `verify`: check every segment's checksum when it is read here.
        `daemon_uid`: the user that the daemon runs as, where that is neither root nor this process's: nothing is sent
        to a process of any other (`tokenlake.local_socket`).

        Raises `Unreachable`, `ListenerUntrusted`, `LayoutRefused`, `CredentialRefused`, `ProtocolRefused`,
        `LimitReached`.
        """
        path = None if socket is None else Path(socket)
        return cls(path, layout, credential, session or SessionId(0), verify, daemon_uid)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- keys

    def prefix(
        self,
        tokens: TokenIds = (),
        *,
        adapter: str | None = None,
        salt: str | None = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        weights_digest: str | None = None,
    ) -> Prefix:
        """The key chain of a prompt: hash it once, `extend` it later. `adapter`, `salt` and `extras` (digests
        of what the tokens do not say, by segment) change all keys from there on. `weights_digest`: of weights
        that were changed in place; None: the layout's. The keys are those of a pool whose layout has this digest."""
        layout = self.layout
        if weights_digest is not None:
            layout = msgspec.structs.replace(layout, weights_digest=weights_digest)
        chain = Prefix(root_key(self._link.secret, layout.fingerprint(), adapter, salt), layout.segment_tokens, extras)
        chain.extend(tokens)
        return chain

    # -- reading

    def match(
        self,
        keys: Sequence[SegmentKey],
        *,
        deadline_s: float = MATCH_S,
        request: str | None = None,
        hints: Hints | None = None,
        tokens: int = 0,
        in_flight_wait_s: float = 0.0,
        in_flight_wait_per_segment_s: float = 0.0,
    ) -> Lease:
        """Lease the longest prefix of `keys` that the pool has; `hits` may be 0. Other nodes are asked for at
        most `deadline_s`. `request`: what the logs of all nodes are to call it by; without one it gets a name.
        `in_flight_wait_s`, at most 10: wait so long where somebody else is about to write what comes next; where
        nobody is,
        the others wait for the caller, so that a prompt that all ask for at once is computed once.
        `in_flight_wait_per_segment_s`: of it, so much for each segment that turns out to be missing; 0: all of it.
        `hints`: what is known of the request already (`tokenlake.hints`). `tokens`: of the prompt, for `tokenlake
        explain`, which without it knows only of full segments. Raises `Unreachable`."""
        return self.begin_match(
            keys,
            deadline_s=deadline_s,
            request=request,
            hints=hints,
            tokens=tokens,
            in_flight_wait_s=in_flight_wait_s,
            in_flight_wait_per_segment_s=in_flight_wait_per_segment_s,
        ).wait()

    def begin_match(
        self,
        keys: Sequence[SegmentKey],
        *,
        deadline_s: float = MATCH_S,
        request: str | None = None,
        hints: Hints | None = None,
        tokens: int = 0,
        in_flight_wait_s: float = 0.0,
        planned: bool = False,
        in_flight_wait_per_segment_s: float = 0.0,
    ) -> PendingMatch:
        """The same without waiting: `poll` the result. `planned`: one of a batch that is planned as a whole, so what is
        hot is spread over its copies exactly. Raises `Unreachable`."""
        self._books.sweep()
        waits = in_flight_wait_s, planned, in_flight_wait_per_segment_s
        return PendingMatch(self._reading, keys, deadline_s, self._named(request), hints, tokens, *waits)

    def begin_beat(self) -> PendingBeat:
        """Ask the daemon for a sign of life without waiting for it: a match that waits for somebody says nothing
        meanwhile. Raises `Unreachable`."""
        return PendingBeat(self._link)

    def attach(self, lease: LeaseId, *, request: str = "") -> Lease:
        """Hold a lease that another process of this session made. Its keys are not known here; `hits` is 0 when
        the lease has ended. `request`: as of `match`. Raises `Unreachable`."""
        with self._books.attaching(lease, write=False) as (link, reply):
            matched = link.expect(reply, engine.Matched)
            keys = [SegmentKey(b"")] * matched.hits
            return Lease(self._reading, link, keys, matched, request[:MAX_REQUEST_NAME])

    # -- writing

    def store(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> Write:
        """Reserve slots for consecutive segments of one prompt, the first at index `first`; fill and commit
        them. What is there already, or refused, has no slot. `patience`: how many seconds to go on trying
        while only the write budget stands in the way. `request`, `hints`: as of `match`. Raises `Unreachable`."""
        self._books.sweep()
        name = self._named(request)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %r: store of %d segments", name, len(keys))
        until = time.monotonic() + patience
        pause = RETRY_S
        packed = join_keys(keys)
        while True:
            link = self._link
            reply = link.call(
                lambda number: engine.Prepare(number, packed, first, name, hints), engine.Prepared, STORE_S
            )
            stuck = not reply.write and Code.WRITE_BUDGET in reply.codes
            if not stuck or time.monotonic() + pause > until:
                return Write(self._reading, link, self.layout.shards, keys, reply)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Source,
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> bytes:
        """Store consecutive segments a window at a time; one `Code` per key.

        `fill`: called as `fill(index into keys, slot)` for each slot, or an array for each key. Where the write budget
        is full, goes on trying for at most `patience` seconds without progress. `request`, `hints`: as of `match`.
        Raises `Unreachable`, and what `fill` raises.
        """
        codes = bytearray()
        while len(codes) < len(keys):
            start = len(codes)
            window = keys[start : start + STORE_WINDOW]
            with self.store(window, first + start, patience, request=request, hints=hints) as write:
                write.fill(_from(fill, start))
            done = len(write.codes)
            if Code.COMMITTED in write.codes and Code.WRITE_BUDGET in write.codes:
                # Some of the window went through: the rest is tried again, with its own patience.
                done = write.codes.index(Code.WRITE_BUDGET)
            codes += write.codes[:done]
        return bytes(codes)

    def reserve(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        *,
        deadline_s: float | None = None,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> Reservation:
        """Reserve slots, as `store` does, that other processes of this session fill. Raises `Unreachable`."""
        self._books.sweep()
        link, packed, name = self._link, join_keys(keys), self._named(request)
        reply = link.call(
            lambda number: engine.Prepare(number, packed, first, name, hints), engine.Prepared, deadline_s
        )
        return Reservation(self._reading, link, reply)

    def attach_write(self, write: WriteId) -> Write:
        """Fill a write that another process of this session began, each process its own shards. Its keys are not
        known here. Raises `Unreachable`, and `ProtocolRefused` when the write has ended."""
        with self._books.attaching(write, write=True) as (link, reply):
            prepared = link.expect(reply, engine.Prepared)
            return Write(self._reading, link, self.layout.shards, [SegmentKey(b"")] * len(prepared.codes), prepared)

    # -- hints

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """A word about consecutive segments of one prompt that is known only now: this conversation goes on, or is
        over. It reaches who keeps them within a second, and is no use of them. Never waits, never raises;
        without a daemon it is lost."""
        with contextlib.suppress(TokenLakeError):
            for start in range(0, len(keys), HINTED):
                self._link.channel.tell(engine.Hint(join_keys(keys[start : start + HINTED]), hints))

    def claim(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """These are about to be computed here, and stored a part at a time: matches with `in_flight_wait_s` wait for
        them, for
        `seconds` (at most 10); 0: not any more. A match that may wait claims the first that it misses by itself. Never
        waits, never raises."""
        with contextlib.suppress(TokenLakeError):
            self._link.channel.tell(engine.Claim(join_keys(keys[:HINTED]), seconds))

    # -- attention where the cache lies (`tokenlake_client.queries`)

    def open_view(self, lease: Lease, heads: int, scale: float, deadline_s: float = VIEW_S) -> View:
        """Segments of `lease` for queries of `heads` heads. Takes the lease over, unless it raises: `Unreachable`, or
        what the query engine refuses with."""
        return self._queries.open_view(lease, heads, scale, deadline_s)

    def init_query(self, parts: Sequence[tuple[View, int]], dtype: str | None = None) -> QueryBuffer:
        """Memory for the queries of these (view, tokens), to be written before each `query`. Raises `LayoutRefused`
        for parts that do not fit together."""
        return self._queries.init_query(parts, dtype)

    def query(self, buffer: QueryBuffer, layer: int, deadline_s: float = QUERY_S) -> Ticket:
        """Start attention of the buffer's queries over `layer` of their views. Never raises, never waits; what does
        not come within `deadline_s` is LOST."""
        return self._queries.query(buffer, layer, deadline_s)

    def init_transfer(self, parts: Sequence[tuple[Sequence[SegmentKey], int]]) -> Transfer:
        """Reserve slots for new cache of several prompts: (keys, index of the first in its prompt) each. What is there
        already, or refused, gets none, and is not copied. Raises `Unreachable`; then nothing stays reserved."""
        writes: list[Write] = []
        try:
            for keys, first in parts:
                writes.append(self.store(keys, first))
        except BaseException:
            for write in writes:
                write.abort()
            raise
        return Transfer(self.layout, writes, self._putting)

    def put(self, transfer: Transfer, layer: int, parts: Sequence[LayerCache]) -> None:
        """Copy one layer of new cache into its slots, behind the caller's back (`Transfer.put`)."""
        transfer.put(layer, parts)

    # -- life

    def close(self) -> None:
        """Leave the session. Idempotent. Arrays still alive stay readable, and so do the slots of a write that was
        neither committed nor aborted; what they lie in is quarantined until this process ends. A pool that nobody has
        any more is closed when the last of its leases, writes and arrays is gone."""
        if self._process != os.getpid():
            # The session is the parent's: a forked child has nothing to say in it.
            return
        self._queries.close()
        # Copies under way are finished: their slots must not be given back while a thread writes there.
        self._putting.shutdown()
        self._books.close()

    @property
    def _link(self) -> Link:
        return self._books.link

    def _named(self, request: str | None) -> str:
        return f"{self._name}-{next(self._requests)}" if request is None else request[:MAX_REQUEST_NAME]

    @property
    def socket(self) -> Path:
        """Of the daemon."""
        return self._link.channel.path

    @property
    def verify(self) -> bool:
        """Is every segment's checksum checked when it is read here?"""
        return self._reading.verify

    @property
    def corrupt(self) -> int:
        """Segments whose bytes did not match their checksum on a local read (only with `verify`)."""
        return self._reading.corrupt

    @property
    def connected(self) -> bool:
        """Is there a connection to the daemon, as far as anybody noticed?"""
        return not self._link.channel.broken

    @property
    def timeouts(self) -> int:
        """Calls on the current connection that waited for their whole deadline in vain."""
        return self._link.channel.timeouts

    @property
    def node(self) -> str:
        """The daemon's."""
        return self._link.node

    @property
    def tenant(self) -> TenantId:
        """What the credential stands for."""
        return self._link.tenant

    @property
    def session(self) -> SessionId:
        """For `connect` in another process of this engine. Another one after the daemon restarted."""
        return self._link.session

    @property
    def incarnation(self) -> int:
        """Of the daemon: another one after each of its starts."""
        return self._link.incarnation

    @property
    def expired(self) -> int:
        """Times the daemon had given this session up because its heartbeats stayed away."""
        return self._heart.expired


def _from(source: Source, start: int) -> Source:
    """The same for the keys from `start` on."""
    if callable(source):
        return lambda index, slot: source(start + index, slot)
    return source[start:]
