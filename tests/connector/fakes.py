"""A pool and requests for the scheduler's side of the connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenlake.content import contents_of
from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Prefix, Salt, TokenIds
from tokenlake.wire import Code
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions


@dataclass
class FakeRequest:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakeLease:
    """A lease, and the answer to the question for its nodes."""

    ids: tuple[LeaseId, ...]
    hits: int
    local_hits: int
    released: bool = False
    incarnation: int = 1
    nodes: list[str] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)
    released_from: int | None = None
    answers: bool = True
    took: tuple[int, int, float] | None = None

    def begin_nodes(self) -> FakeLease:
        return self

    def poll(self) -> list[str] | None:
        return self.nodes if self.answers else None

    def cancel(self) -> None: ...

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        # Once the lease has ended, it is too late.
        if not self.released:
            self.took = start, stop, saved_s

    def release(self, start: int = 0) -> None:
        self.released_from = start if self.released_from is None else min(start, self.released_from)
        self.released = self.released_from == 0


@dataclass
class FakeMatch:
    pool: FakePool
    keys: Sequence[SegmentKey]
    options: MatchOptions
    cancelled: bool = False
    lease: FakeLease | None = None
    answers: int = 0
    further: bool = False
    """Has an answer arrived after which further keys are asked for?"""

    def poll(self) -> FakeLease | None:
        self.answers += self.further
        self.further = False
        if not self.pool.reachable:
            raise Unreachable("gone")
        if self.lease is None and self.pool.answers:
            hits = next((at for at, key in enumerate(self.keys) if key not in self.pool.known), len(self.keys))
            nodes = [self.pool.places.get(key, self.pool.node) for key in self.keys[:hits]]
            here = nodes.count(self.pool.node)
            self.lease = FakeLease((LeaseId(len(self.pool.leases) + 1),), hits, here, nodes=nodes, disk_s=[0.0] * hits)
            self.lease.answers = self.pool.answers_where
            self.pool.leases.append(self.lease)
        return self.lease

    def cancel(self) -> None:
        self.cancelled = True
        if self.lease is not None:
            self.lease.release()


@dataclass
class FakeReservation:
    id: WriteId
    codes: bytes
    request: str | None = None
    hints: Hints | None = None
    released: bool = False
    incarnation: int = 1

    def release(self) -> None:
        self.released = True


@dataclass
class FakePool:
    node: str = "here"
    session: int = 7
    incarnation: int = 1
    connected: bool = True
    reachable: bool = True
    answers: bool = True
    answers_where: bool = True
    places: dict[SegmentKey, str] = field(default_factory=dict)
    """The node of each segment that is not on this node."""
    known: set[SegmentKey] = field(default_factory=set)
    leases: list[FakeLease] = field(default_factory=list)
    matches: list[FakeMatch] = field(default_factory=list)
    reservations: list[FakeReservation] = field(default_factory=list)
    marked: list[tuple[tuple[SegmentKey, ...], float]] = field(default_factory=list)
    hinted: list[tuple[tuple[SegmentKey, ...], Hints]] = field(default_factory=list)
    prefetched: list[tuple[tuple[SegmentKey, ...], str]] = field(default_factory=list)
    refuse_from: int = 1 << 30
    """The index in a reservation from which segments are refused."""
    segment_tokens: int = 8
    hashed: int = 0
    published: tuple[str, ...] = ()
    """The models whose segments the daemon publishes to routers."""
    contents_sent: list[bytes] = field(default_factory=list)

    @property
    def engine(self) -> FakePool:
        return self

    def prefix(
        self,
        tokens: TokenIds = (),
        *,
        adapter: str | None = None,
        salt: Salt = None,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        weights_digest: str | None = None,
    ) -> Prefix:
        self.hashed += 1
        root = f"{salt or ''}{weights_digest or ''}{adapter or ''}".encode()
        chain = Prefix(SegmentKey(root.ljust(32, b"\0")), self.segment_tokens, extras)
        chain.extend(tokens)
        return chain

    def contents(
        self, prefix: Prefix, tokens: TokenIds, segments: range, model: str, adapter: str = ""
    ) -> tuple[bytes, ...]:
        return contents_of(prefix, tokens, segments, model, adapter) if model in self.published else ()

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH, *, deadline_s: float | None = None
    ) -> FakeMatch:
        if not self.reachable:
            raise Unreachable("gone")
        self.matches.append(FakeMatch(self, keys, options))
        return self.matches[-1]

    def reserve(
        self,
        keys: Sequence[SegmentKey],
        first: int = 0,
        *,
        deadline_s: float = 0.02,
        request: str | None = None,
        hints: Hints | None = None,
        contents: Sequence[bytes] = (),
    ) -> FakeReservation:
        if not self.reachable:
            raise Unreachable("gone")
        codes = bytes(Code.RESERVED if at < self.refuse_from else Code.WRITE_BUDGET for at in range(len(keys)))
        number = len(self.reservations) + 1 if Code.RESERVED in codes else 0
        self.contents_sent += contents
        self.reservations.append(FakeReservation(WriteId(number), codes, request, hints=hints))
        return self.reservations[-1]

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        self.marked.append((tuple(keys), seconds))

    def prefetch(self, keys: Sequence[SegmentKey], source: str = "") -> None:
        if not self.reachable:
            raise Unreachable("gone")
        self.prefetched.append((tuple(keys), source))

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        self.hinted.append((tuple(keys), hints))

    def close(self) -> None: ...
