"""What is known of one match while it is under way."""

from __future__ import annotations

from tokenlake.core.access import KnownAccess
from tokenlake.core.pendings import Waiting
from tokenlake.core.sessions import Process
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.store import Segment
from tokenlake.wire import Code
from tokenlake.wire import engine as wire

__all__ = ["MatchUnderWay"]


class MatchUnderWay:
    """Changed by `Matches` and its `Rounds` alone."""

    def __init__(
        self, process: Process, request: wire.Match, keys: list[SegmentKey], segments: list[Segment | None]
    ) -> None:
        self.process = process
        self.request = request
        self.keys = keys
        self.segments = segments
        self.remotes: list[NodeId | None] = [None] * len(keys)
        self.codes = bytearray([Code.LOCAL]) * len(keys)
        """The most telling of the answers: LOCAL, REMOTE, PENDING, MISSING, UNKNOWN, ..."""
        self.leases: dict[NodeId, list[int]] = {}
        self.known_accesses: list[KnownAccess] = []
        """Of each answer its deepest key that is known there."""
        self.silent: list[NodeId] = []
        """Who did not answer."""
        self.waiting = 0
        self.deadline = 0.0
        self.arrivals = 0
        """Of the store, when what is here was looked up last."""
        self.own: list[int] = []
        """Indices of the keys that this node is a candidate of, until its own directory is asked."""
        self.candidates: dict[int, tuple[NodeId, NodeId]] = {}
        """By index of the keys that are not here."""
        self.probes: list[int] = []
        """Of many nodes: indices that are asked about first."""
        self.later: list[int] = []
        """Those between and behind, until the probes are answered."""
        self.round: dict[NodeId, list[int]] = {}
        """Whom the newest round asked first about which indices."""
        self.asked: set[tuple[int, NodeId]] = set()
        """(key index, who was asked beside the candidates); only ever tested for membership."""
        self.denied: set[tuple[int, NodeId]] = set()
        """(key index, who does not have it though it may be elsewhere); only ever tested for membership."""
        self.hints: dict[int, tuple[NodeId, NodeId]] = {}
        """Per key index, (directory node that named a node, the node named)."""
        self.hot: dict[int, NodeId] = {}
        """Per key index, who was asked instead of the candidates and has not answered."""
        self.rather: dict[int, NodeId] = {}
        """Per key index, who is asked beside the one that has it, since many read it there."""
        self.waits: Waiting | None = None
        """Where it may wait for a writer."""
        self.asking = False
        """Answers of others are listened to: it is neither done nor waiting for a writer."""
        self.given_up: list[list[int]] = []
        """The indices of calls that are not waited for any more."""

    def missing(self) -> list[int]:
        """Indices of the keys that are not here, ascending."""
        return [index for index, segment in enumerate(self.segments) if segment is None]

    def found(self, limit: int) -> int:
        """How many of the first `limit` keys are here or elsewhere, from the first on without a gap."""
        places = zip(self.segments[:limit], self.remotes, strict=False)
        gaps = (index for index, (segment, remote) in enumerate(places) if segment is None and remote is None)
        return next(gaps, limit)
