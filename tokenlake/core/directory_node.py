"""This node as a directory node: what it answers about the segments that hash to it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.peers import Peers
from tokenlake.directory import Entry, Standing
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId
from tokenlake.store.removals import CORRUPT_RULE
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["DirectoryNode"]

_PENDING = Standing.PENDING


class DirectoryNode:
    """Directory, and whether it can be trusted yet.

    A directory node that started knows nothing of what others hold: until they all advertised it answers UNKNOWN where
    it would say MISSING.
    """

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._advertised: dict[NodeId, Incarnation] = {}
        self._complete = False

    def advertised(self, node: NodeId) -> None:
        """`node` told all its primary copies."""
        peer = self._peers.get(node)
        if peer is not None:
            self._advertised[node] = peer.incarnation

    @property
    def complete(self) -> bool:
        """Has every peer that is up advertised, or did it have time enough to?"""
        if not self._complete:
            waited = self._context.now >= self._context.started + self._context.config.sync_grace_s
            self._complete = waited or all(
                peer.up and self._advertised.get(peer.node) == peer.incarnation for peer in self._peers
            )
        return self._complete

    def ask(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> list[tuple[Code, NodeId | None]]:
        """What the directory says of each: ELSEWHERE with the node (never this one, never one that is gone), PENDING,
        MISSING or UNKNOWN."""
        entries = self._context.directory.get_all(tenant, keys, self._context.now)
        nothing = (Code.MISSING if self.complete else Code.UNKNOWN), None
        # Whoever has one of them mostly has many: said once for each node.
        said: dict[NodeId, tuple[Code, NodeId | None]] = {}
        answers: list[tuple[Code, NodeId | None]] = []
        for entry in entries:
            if entry is None:
                answers.append(nothing)
            elif entry.standing is _PENDING:
                answers.append(self._tell(entry))
            else:
                if entry.node not in said:
                    said[entry.node] = self._tell(entry)
                answers.append(said[entry.node])
        return answers

    def _tell(self, entry: Entry) -> tuple[Code, NodeId | None]:
        mine = entry.node == self._context.node
        if not mine and not self._peers.usable(entry.node):
            return Code.UNKNOWN, None
        if entry.standing is Standing.PENDING:
            return Code.PENDING, None
        return (Code.MISSING, None) if mine else (Code.ELSEWHERE, entry.node)

    def announce(self, node: NodeId, message: wire.Announce, keys: Sequence[SegmentKey]) -> None:
        """`node` writes these."""
        for key in keys:
            self.claim(node, TenantId(message.tenant), key, message.deadline_s)

    def claim(self, node: NodeId, tenant: TenantId, key: SegmentKey, claim_s: float) -> None:
        """`node` writes it, or is about to, for so long at most."""
        # In this order: a deadline that is no number loses.
        deadline = self._context.now + min(self._context.config.reservation_s, claim_s)
        self._context.directory.pending(tenant, key, node, self._life(node), deadline, self._context.now)

    def left(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey], rule: str = "") -> None:
        """`node` does not have these any more, or did not take them. If it is a candidate of them it remembers them,
        unless they left by the rule for wrong bytes."""
        directory = self._context.directory
        for key, pair in zip(keys, self._context.ring.candidates(join_keys(keys)), strict=True):
            directory.gone(tenant, key, node)
            if node in pair and rule != CORRUPT_RULE:
                directory.remember(tenant, key, node)

    def ready(
        self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey]
    ) -> tuple[bytes, list[NodeId], list[NodeId]]:
        """`node` committed these: COMMITTED, with whoever remembers it ("" for nobody), or EXISTS with the node whose
        commit came first. A first that is down has nothing any more."""
        codes = bytearray()
        firsts: list[NodeId] = []
        previous_owners: list[NodeId] = []
        for key in keys:
            first = self._context.directory.ready(tenant, key, node, self._life(node))
            if first is not None and not self._lives(first):
                self._context.directory.gone(tenant, key, first)
                first = self._context.directory.ready(tenant, key, node, self._life(node))
            codes.append(Code.COMMITTED if first is None else Code.EXISTS)
            if first is not None:
                firsts.append(first)
            else:
                previous_owners.append(self._context.directory.previous_owner(tenant, key) or NodeId(""))
        return bytes(codes), firsts, previous_owners if any(previous_owners) else []

    def held(self, node: NodeId, tenant: TenantId, keys: Sequence[SegmentKey]) -> wire.Redundant:
        """`node` keeps the primary copies of these. What to tell it: where another living node does."""
        redundant: list[SegmentKey] = []
        owners: list[str] = []
        for key in keys:
            owner = self._context.directory.held(tenant, key, node, self._life(node))
            if owner is not None and not self._lives(owner):
                self._context.directory.gone(tenant, key, owner)
                owner = self._context.directory.held(tenant, key, node, self._life(node))
            if owner is not None:
                redundant.append(key)
                owners.append(owner)
        return wire.Redundant(tenant, join_keys(redundant), tuple(owners))

    def _life(self, node: NodeId) -> Incarnation:
        peer = self._peers.get(node)
        return self._context.incarnation if peer is None else peer.incarnation

    def _lives(self, node: NodeId) -> bool:
        return node == self._context.node or self._peers.reachable(node)
