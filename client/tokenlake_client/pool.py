"""Pool: the blocking client that an engine imports."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tokenlake.content import MAX_CONTENT_BYTES, contents_of
from tokenlake.errors import LimitReached, TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import Fingerprint, LeaseId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.keys import Prefix, Salt, TokenIds, opaque_keys, root_key
from tokenlake.layout import Layout
from tokenlake.opaque_layout import AnyLayout, understood
from tokenlake.wire import Code, engine
from tokenlake.wire.engine import MAX_KEYS
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.match_deadline import match_deadline_s
from tokenlake_client.arguments import index, packed
from tokenlake_client.arguments import seconds as check_seconds
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.grants import Grants, closed_with_arrays
from tokenlake_client.heartbeat import HeartbeatThread, PendingHeartbeat, Wake
from tokenlake_client.lease import Lease
from tokenlake_client.link import Connector, Link
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions, PendingMatch
from tokenlake_client.pool_state import PoolState
from tokenlake_client.queries import Queries, QueryBuffer, Ticket, View
from tokenlake_client.transfer import LayerCache, Transfer
from tokenlake_client.write import Reservation, Source, Write, check_source

log = logging.getLogger(__name__)

MAX_CLOSED = 64
"""Limit of the closed pools of a process that wait for their arrays and writes; each keeps a session at its daemon."""
RETRY_S, LONGEST_RETRY_S = 0.002, 0.05
"""Seconds of the first pause and of the longest one between attempts to store while the write budget is used up; each
pause is twice the one before."""
_NOT_RESERVED = bytes([Code.SESSION_LIMIT])
STORE_WINDOW = 32
"""Number of segments that `store_all` reserves at a time, so that one prompt does not use up the write budget."""


class Pool:
    """The connection of one engine process, as a member of a session, to the daemon of its node. Thread-safe.

    When the daemon dies, the pool reconnects in the background. Until then calls raise `Unreachable` at once, and the
    leases are gone; arrays that were handed out stay readable and correct. When the daemon freezes, one call waits
    for its deadline, and further calls raise `DeadlinePassed` at once until the daemon answers.
    """

    def __init__(self, connector: Connector, wake: Wake, session: SessionId, *, verify: bool) -> None:
        """Made by `connect`."""
        layout = connector.layout
        layout.check()
        if (count := closed_with_arrays()) >= MAX_CLOSED:
            raise LimitReached(
                f"{count} closed pools of this process have arrays or writes that are alive, which keep their "
                "sessions: drop these before another pool is opened"
            )
        self.deadlines = connector.deadlines
        self._process = os.getpid()
        self._grants = Grants(connector.connect(session))
        # Leases and writes refer to the state. Neither the state nor the heartbeat thread refers to them or to the
        # pool, so that a pool that no code uses can be collected.
        self._state = PoolState(self._grants, layout, self.deadlines, verify=verify)
        self._heartbeat = HeartbeatThread(self._grants, connector, wake, self._state)
        try:
            self._heartbeat.start()
        except RuntimeError as error:
            self._grants.close()
            raise LimitReached(f"the thread of the client's heartbeat cannot be started: {error}") from error
        self._queries = Queries(self._state)
        self._put_executor = ThreadPoolExecutor(1, thread_name_prefix="tokenlake-put")
        self._name = secrets.token_hex(4)
        self._requests = itertools.count(1)
        self._unpublished: object = None
        """The life of the last link over which the daemon was told that it publishes other models."""

    @classmethod
    def connect(
        cls,
        socket: str | Path | None,
        layout: AnyLayout,
        credential: str | None = None,
        *,
        session: SessionId | None = None,
        verify: bool = False,
        daemon_uid: int | None = None,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> Pool:
        """Join the daemon at `socket`; None: the default place of a daemon of this user, else of the system.

        `credential`: a token of the tenant; without one the daemon uses the tenant of the process's uid. `session`:
        join the session that another process of the same engine opened. `verify`: check each segment's checksum when it
        is read. `daemon_uid`: the user that the daemon runs as, where that is neither root nor this process's; a
        process of any other user is sent nothing (`tokenlake.wire.local_socket`).

        Raises `Unreachable`, `ListenerUntrusted`, `LayoutRefused`, `CredentialRefused`, `ProtocolRefused`,
        `LimitReached`.
        """
        path, wake = None if socket is None else Path(socket), Wake()
        connector = Connector(path, daemon_uid, layout, credential, wake, deadlines)
        return cls(connector, wake, session or SessionId(0), verify=verify)

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
        salt: Salt = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        weights_digest: str | None = None,
    ) -> Prefix:
        """The key chain of a prompt: hash it once, `extend` it later. `adapter` and `salt` change all keys; `extras`
        (by the index of a segment, digests of inputs that have no token ids) change the keys from that segment on.
        `weights_digest`: that of weights that were changed in place (default: the layout's). The keys are then those of
        a pool whose layout has this digest."""
        root = root_key(self.link.secret, self._fingerprint(weights_digest), adapter, salt)
        chain = Prefix(root, self._state.layout.segment_tokens, extras)
        chain.extend(tokens)
        return chain

    def opaque_keys(
        self,
        engine_keys: Iterable[tuple[int, bytes]],
        *,
        adapter: str | None = None,
        salt: Salt = None,
        weights_digest: str | None = None,
    ) -> list[SegmentKey]:
        """The keys of segments that the engine names: (number of its cache group, its own 32-byte hash) each. The keys
        do not depend on each other; match them with `MatchOptions.independent`. `adapter`, `salt`, `weights_digest`: as
        of `prefix`. Raises `ValueError` for a hash of another length."""
        secret, fingerprint = self.link.secret, self._fingerprint(weights_digest)
        return opaque_keys(secret, fingerprint, engine_keys, adapter, salt)

    def contents(
        self, prefix: Prefix, tokens: TokenIds, segments: range, model: str, adapter: str = ""
    ) -> tuple[bytes, ...]:
        """The contents of `segments` of a prompt, for the argument `contents` of `store`: routers are told of segments
        by them. Empty unless the daemon publishes the segments of `model`, the name under which the engine serves it.
        `tokens`: those of the prompt from the first one on. `adapter`: the name that requests use. Only for a prompt
        that its tokens and the adapter determine: one without `salt` and `extras` of its own."""
        link = self.link
        if model in link.published:
            return contents_of(prefix, tokens, segments, model, adapter)
        if model and link.published and link.life != self._unpublished:
            self._unpublished = link.life
            with contextlib.suppress(TokenLakeError):
                link.channel.tell(engine.Unpublished(model[: engine.MAX_MODEL]))
        return ()

    def _fingerprint(self, weights_digest: str | None) -> Fingerprint:
        layout = self._state.layout
        if weights_digest is not None:
            layout = msgspec.structs.replace(layout, weights_digest=weights_digest)
        return layout.fingerprint()

    # -- reading

    def match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH, *, deadline_s: float | None = None
    ) -> Lease:
        """Lease the longest prefix of `keys` that the pool has or, with `MatchOptions.independent`, all of `keys` that
        it has; `hits` may be 0. `deadline_s`: the seconds for which the daemon may ask other nodes (default:
        `Deadlines.match_s`, and 20 us for each key). Raises `Unreachable`, and `ValueError` for keys of another
        length."""
        return self.begin_match(keys, options, deadline_s=deadline_s).wait()

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH, *, deadline_s: float | None = None
    ) -> PendingMatch:
        """Send a `match` without waiting for its answer, which `poll` returns. Raises `Unreachable`."""
        self._grants.sweep()
        deadline_s = match_deadline_s(self.deadlines.match_s, len(keys)) if deadline_s is None else deadline_s
        return PendingMatch(self._state, keys, self._request_name(options.request), options, deadline_s)

    def begin_heartbeat(self) -> PendingHeartbeat:
        """Send a heartbeat without waiting for its reply. For callers of a match that waits for another engine: the
        daemon does not answer the match meanwhile, and a heartbeat shows that it is alive. Raises `Unreachable`."""
        return PendingHeartbeat(self._grants.open_link)

    def attach(self, *parts: LeaseId, request: str = "", deadline_s: float | None = None) -> Lease:
        """Hold a lease that another process of this session made, given by all its `ids`. The returned lease has no
        `keys`; its segments have the same indices. Its `hits` is 0 when the lease has ended, and less than in the other
        process where a part has ended. `request`: see `MatchOptions`. `deadline_s`: by default `Deadlines.call_s`.
        Raises `Unreachable`."""
        if not parts:
            raise ValueError("argument 'parts' is empty; expected all 'ids' of a lease")
        deadline_s = self.deadlines.call_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        until = time.monotonic() + deadline_s
        with contextlib.ExitStack() as attached:
            granted: list[engine.Matched] = []
            for part in parts:
                left_s = max(0.0, until - time.monotonic())
                link, reply = attached.enter_context(self._grants.attaching(part, left_s, write=False))
                granted.append(link.expect(reply, engine.Matched))
                if not granted[-1].hits:
                    # This part has ended: the segments of later ones would have other indices than in the lease.
                    break
            keys = [SegmentKey(b"")] * sum(matched.hits for matched in granted)
            return Lease(self._state, link, keys, granted, request[:MAX_REQUEST_NAME])

    # -- writing

    def store(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
        contents: Sequence[bytes] = (),
    ) -> Write:
        """Reserve slots for consecutive segments of one prompt, the first at index `first`; fill and commit them. A
        segment that the pool has already, or refuses, gets no slot. `patience`: seconds to try again while no segment
        gets a slot, and the reason may pass (`Code.first_passing`). `request`, `hints`: as of `MatchOptions`.
        `contents`: those of `keys`, from the method `contents`. Raises `Unreachable`."""
        index("first", first)
        until = time.monotonic() + check_seconds("patience", patience)
        self._grants.sweep()
        name = self._request_name(request)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %r: store of %d segments", name, len(keys))
        pause = RETRY_S
        sent = _that_fit(keys, contents)
        joined, told = packed(keys[:sent]), tuple(contents[:sent])
        while True:
            link = self._grants.open_link
            reply = link.call(
                lambda number: engine.Prepare(number, joined, first, name, hints, told),
                engine.Prepared,
                self.deadlines.store_s,
            )
            wait = not reply.write and Code.first_passing(reply.codes) >= 0
            if not wait or time.monotonic() + pause > until:
                return Write(self._state, link, keys, _for_all(reply, len(keys) - sent))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Source,
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
        contents: Sequence[bytes] = (),
    ) -> bytes:
        """Store consecutive segments of one prompt, the first at index `first`, `STORE_WINDOW` at a time; returns one
        `Code` per key.

        `fill`: called as `fill(index into keys, slot)` for each slot, or an array for each key (`Source`). Tries again
        for at most `patience` seconds without progress where the reason of a refusal may pass (`Code.first_passing`).
        `request`, `hints`, `contents`: as of `store`. Raises `Unreachable`, the errors of `fill`, and `ValueError` for
        arrays that do not fit the keys.
        """
        check_seconds("patience", patience)
        check_source(fill, len(keys), self._state.layout.segment_bytes)
        codes = bytearray()
        while len(codes) < len(keys):
            start = len(codes)
            told = contents[start : start + STORE_WINDOW]
            window = keys[start : start + min(STORE_WINDOW, _that_fit(keys[start:], told))]
            told = told[: len(window)]
            with self.store(window, first + start, patience, request=request, hints=hints, contents=told) as write:
                write.fill(_from(fill, start, len(window)))
            done = len(write.codes)
            refused = Code.first_passing(write.codes)
            if Code.COMMITTED in write.codes and refused >= 0:
                # A budget ended within the window: the next window begins with the first segment that was refused, and
                # may again wait for the whole `patience`.
                done = refused
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
        contents: Sequence[bytes] = (),
    ) -> Reservation:
        """Reserve slots, as `store` does, that other processes of this session fill. `deadline_s`: by default
        `Deadlines.call_s`. Raises `Unreachable`."""
        index("first", first)
        deadline_s = self.deadlines.call_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        self._grants.sweep()
        sent = _that_fit(keys, contents)
        link, joined, name = self._grants.open_link, packed(keys[:sent]), self._request_name(request)
        told = tuple(contents[:sent])
        reply = link.call(
            lambda number: engine.Prepare(number, joined, first, name, hints, told), engine.Prepared, deadline_s
        )
        return Reservation(self._state, link, _for_all(reply, len(keys) - sent))

    def attach_write(self, write: WriteId) -> Write:
        """Fill a write that another process of this session began; each process fills its own shards. The keys of the
        returned write are not known. Raises `Unreachable`, and `ProtocolRefused` when the write has ended."""
        with self._grants.attaching(write, self.deadlines.store_s, write=True) as (link, reply):
            prepared = link.expect(reply, engine.Prepared)
            return Write(self._state, link, [SegmentKey(b"")] * len(prepared.codes), prepared)

    # -- hints

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """Send a hint about consecutive segments of one prompt that is known only now: the conversation goes on, or is
        over. It reaches the owners within a second and does not count as a read. Never waits; the hint is lost while
        there is no daemon. Raises `ValueError` for arguments that are not keys and hints, and no other error."""
        if not isinstance(hints, Hints):
            raise ValueError(f"argument 'hints' is {hints!r}; expected hints")
        with contextlib.suppress(TokenLakeError):
            for start in range(0, len(keys), MAX_KEYS):
                self.link.channel.tell(engine.Hint(packed(keys[start : start + MAX_KEYS]), hints))

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        """Set in-flight markers: these segments are computed here and stored a part at a time, and matches with
        `in_flight_wait_s` wait for them, for `seconds` (at most 10); 0 removes the markers. The marker of the first
        segment that a match with `in_flight_wait_s` misses is set by the match itself. Never waits, never raises."""
        check_seconds("seconds", seconds)
        with contextlib.suppress(TokenLakeError):
            # The daemon keeps at most `MAX_KEYS` markers of a process.
            self.link.channel.tell(engine.MarkInFlight(packed(keys[:MAX_KEYS]), seconds))

    # -- attention in place (`tokenlake_client.queries`)

    def open_view(self, lease: Lease, heads: int, scale: float, deadline_s: float | None = None) -> View:
        """A view of the first 1,024 segments of `lease`, for queries of `heads` heads; logits are `scale` x query .
        key. The view takes the lease over, unless this call raises `Unreachable` or the refusal of the query engine.
        `deadline_s`: by default `Deadlines.view_s`."""
        deadline_s = self.deadlines.view_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        return self._queries.open_view(lease, heads, scale, deadline_s)

    def init_query(self, parts: Sequence[tuple[View, int]], dtype: str | None = None) -> QueryBuffer:
        """Memory for the queries of `parts`, (view, number of query tokens) each, to be written before each `query`.
        Raises `LayoutRefused` for parts that do not fit together, and `LimitReached` for too many parts or tokens."""
        return self._queries.init_query(parts, dtype)

    def query(self, buffer: QueryBuffer, layer: int, deadline_s: float | None = None) -> Ticket:
        """Start attention of the buffer's queries over `layer` of their views. Never waits; parts without a result
        within `deadline_s` (default: `Deadlines.query_s`) are LOST. Raises `LayoutRefused` for a layer that the layout
        lacks, and `ValueError` for a deadline that is negative or not finite."""
        return self._queries.query(buffer, layer, self.deadlines.query_s if deadline_s is None else deadline_s)

    def init_transfer(self, parts: Sequence[tuple[Sequence[SegmentKey], int]]) -> Transfer:
        """Reserve slots for new cache of several prompts: for each (keys, index of the first in its prompt). A segment
        that the pool has already, or refuses, gets no slot and is not copied. Raises `Unreachable`; then nothing stays
        reserved."""
        layout = self.layout
        writes: list[Write] = []
        try:
            for keys, first in parts:
                writes.append(self.store(keys, first))
        except BaseException:
            for write in writes:
                write.abort()
            raise
        return Transfer(layout, writes, self._put_executor)

    def put(self, transfer: Transfer, layer: int, parts: Sequence[LayerCache]) -> None:
        """Copy one layer of new cache into its slots, in the background (`Transfer.put`)."""
        transfer.put(layer, parts)

    # -- life

    def close(self) -> None:
        """Leave the session. Idempotent. Arrays that are alive stay readable, and so do the slots of a write that was
        neither committed nor aborted, which still may be: the pool leaves with the last of them, and keeps its session
        until then. A process opens no pool while `MAX_CLOSED` closed ones wait for theirs. A pool that is garbage is
        closed when the last of its leases, writes and arrays is collected."""
        if self._process != os.getpid():
            # A forked child must not end the session of its parent.
            return
        self._queries.close()
        # Wait for the copies of `put` that are under way: the daemon may reuse their slots after `Grants.close`.
        self._put_executor.shutdown()
        self._grants.close()
        self._heartbeat.wake()

    def _request_name(self, request: str | None) -> str:
        return f"{self._name}-{next(self._requests)}" if request is None else request[:MAX_REQUEST_NAME]

    @property
    def layout(self) -> Layout:
        """The layout of the pool's segments. Raises `LayoutRefused` for an opaque one."""
        return understood(self._state.layout)

    @property
    def link(self) -> Link:
        """The pool's current connection to the daemon, for programs that send messages of their own."""
        return self._grants.link

    @property
    def socket(self) -> Path:
        """The path of the daemon's socket."""
        return self.link.channel.path

    @property
    def verify(self) -> bool:
        """True where the pool checks the checksum of each segment that it reads."""
        return self._state.verify

    @property
    def corrupt(self) -> int:
        """The number of segments whose bytes did not match their checksum when this process read them; 0 unless
        `verify`."""
        return self._state.corrupt

    @property
    def connected(self) -> bool:
        """True while the pool has a connection to the daemon, as far as is known; False from the time that its end was
        noticed until the pool has reconnected."""
        return not self.link.channel.broken

    @property
    def timeouts(self) -> int:
        """The number of calls to the daemon, over the current connection, that missed their deadline."""
        return self.link.channel.timeouts

    @property
    def node(self) -> str:
        """The name of the daemon's node."""
        return self.link.node

    @property
    def tenant(self) -> TenantId:
        """The tenant that the daemon gave this process, by its token or its uid."""
        return self.link.tenant

    @property
    def session(self) -> SessionId:
        """The session's number, by which another process of this engine joins it (`connect`). It changes when the
        daemon restarts."""
        return self.link.session

    @property
    def incarnation(self) -> int:
        """The daemon's incarnation, which changes at each start of the daemon."""
        return self.link.incarnation

    @property
    def expired(self) -> int:
        """The number of times that the daemon had ended this pool's session because no heartbeat had arrived in
        time."""
        return self._heartbeat.expired


def _that_fit(keys: Sequence[SegmentKey], contents: Sequence[bytes]) -> int:
    """The number of segments that one request names: at most `MAX_KEYS`, with contents of `MAX_CONTENT_BYTES`, and at
    least one."""
    left, count = MAX_CONTENT_BYTES, min(len(keys), MAX_KEYS)
    for at, content in enumerate(contents[:count]):
        left -= len(content)
        if left < 0 and at:
            return at
    return count


def _for_all(reply: engine.Prepared, beyond: int) -> engine.Prepared:
    """The daemon's answer, with the code of `beyond` further keys that the request did not name: one request reserves
    far fewer slots than these."""
    return msgspec.structs.replace(reply, codes=reply.codes + _NOT_RESERVED * beyond) if beyond > 0 else reply


def _from(source: Source, start: int, count: int) -> Source:
    """The segments of `source` that belong to `count` keys from index `start` on."""
    if callable(source):
        return lambda index, slot: source(start + index, slot)
    return source[start : start + count]
