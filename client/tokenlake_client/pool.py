"""Pool: the blocking client that a program imports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from tokenlake.errors import LimitReached, TokenLakeError
from tokenlake.hints import MAX_PIN_S, Hints
from tokenlake.identity import Fingerprint, SegmentKey, SessionId
from tokenlake.keys import Prefix, Salt, TokenIds, opaque_keys, root_key
from tokenlake.layout import Layout
from tokenlake.opaque_layout import AnyLayout, understood
from tokenlake.wire import Code, engine
from tokenlake.wire.engine import MAX_CHANGED, MAX_FETCHED
from tokenlake_client.arguments import packed
from tokenlake_client.arguments import seconds as check_seconds
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.engine_calls import EngineCalls
from tokenlake_client.grants import Grants, closed_with_arrays
from tokenlake_client.heartbeat import HeartbeatThread, Wake
from tokenlake_client.lease import Lease
from tokenlake_client.link import Connector, Link
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions
from tokenlake_client.pool_state import PoolState
from tokenlake_client.queries import Queries
from tokenlake_client.write import Source, Write, check_source, store, that_fit

MAX_CLOSED = 64
"""Limit of the closed pools of a process that wait for their arrays and writes; each keeps a session at its daemon."""
STORE_WINDOW = 32
"""Number of segments that `store_all` reserves at a time, so that one prompt does not use up the write budget."""


class Pool:
    """The connection of one engine process, as a member of a session, to the daemon of its node. Thread-safe.

    - An application: `connect`, `prefix` or `opaque_keys`, `match`, `store` or `store_all`, `hint`, `prefetch`,
      `close`.
    - An engine that must not wait, or has ranks, also uses `pool.engine` (`EngineCalls`).
    - Attention over segments where they lie: `pool.queries` (`Queries`).

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
        self.engine = EngineCalls(self._state, self._heartbeat)
        self.queries = Queries(self._state)

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

    def __enter__(self) -> Self:
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
        return self.engine.begin_match(keys, options, deadline_s=deadline_s).wait()

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
        `contents`: those of `keys`, from `EngineCalls.contents`. Raises `Unreachable`."""
        return store(self._state, keys, first, patience, request, hints, contents)

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
            window = keys[start : start + min(STORE_WINDOW, that_fit(keys[start:], told))]
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

    # -- hints

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        """Send a hint about consecutive segments of one prompt that is known only now: the conversation goes on, or is
        over. It reaches the owners within a second and does not count as a read. Never waits; the hint is lost while
        there is no daemon. Raises `ValueError` for arguments that are not keys and hints, and no other error."""
        if not isinstance(hints, Hints):
            raise ValueError(f"argument 'hints' is {hints!r}; expected hints")
        with contextlib.suppress(TokenLakeError):
            for start in range(0, len(keys), MAX_CHANGED):
                self.link.channel.tell(engine.Hint(packed(keys[start : start + MAX_CHANGED]), hints))

    # -- before a request comes

    def prefetch(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        *,
        source: str = "",
        pin_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> bytes:
        """Bring consecutive segments of one prompt, the first at index `first`, to the memory of this node. Returns one
        `Code` per key: LOCAL (it is here), MISSING (no node has it), LOST (it did not come), PENDING (an engine of this
        node is writing it), or a refusal. It counts as no read, and an engine may evict the segments again.

        `source`: the node that is asked first. `pin_s`: pin the segments that are here for so many seconds, at most
        `hints.MAX_PIN_S`; QUOTA: the pins of the tenant are used up. `deadline_s`: for each `MAX_FETCHED` keys, by
        default `Deadlines.store_s`. Raises `Unreachable`, and `ValueError` for arguments of another kind."""
        check_seconds("pin_s", pin_s)
        wait_s = self.deadlines.store_s if deadline_s is None else check_seconds("deadline_s", deadline_s)
        codes = bytearray()
        for start in range(0, len(keys), MAX_FETCHED):
            part, link = packed(keys[start : start + MAX_FETCHED]), self.link
            make = partial(engine.Prefetch, keys=part, first=first + start, source=source, pin_s=min(pin_s, MAX_PIN_S))
            codes += link.expect(link.channel.call(make, wait_s), engine.Prefetched).codes
        return bytes(codes)

    def unpin(self, keys: Sequence[SegmentKey]) -> None:
        """End the pins that segments have at this node. Never waits; nothing ends while there is no daemon."""
        with contextlib.suppress(TokenLakeError):
            for start in range(0, len(keys), MAX_CHANGED):
                self.link.channel.tell(engine.Unpin(packed(keys[start : start + MAX_CHANGED])))

    # -- life

    def close(self) -> None:
        """Leave the session. Idempotent. Arrays that are alive stay readable, and so do the slots of a write that was
        neither committed nor aborted, which still may be: the pool leaves with the last of them, and keeps its session
        until then. A process opens no pool while `MAX_CLOSED` closed ones wait for theirs. A pool that is garbage is
        closed when the last of its leases, writes and arrays is collected."""
        if self._process != os.getpid():
            # A forked child must not end the session of its parent.
            return
        self.queries.close()
        # Before `Grants.close`, after which the daemon may reuse the slots of transfers.
        self.engine.close()
        self._grants.close()
        self._heartbeat.wake()

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
    def node(self) -> str:
        """The name of the daemon's node."""
        return self.link.node


def _from(source: Source, start: int, count: int) -> Source:
    """The segments of `source` that belong to `count` keys from index `start` on."""
    if callable(source):
        return lambda index, slot: source(start + index, slot)
    return source[start : start + count]
