"""Named edges at which a daemon kills itself, as kill -9 would: for tests of the state after a crash.

The steps are those of `docs/architecture.md`: prepare, commit, publish (the directory node is told), fetch, evict, and
the two sides of a hand-over. The rules do no I/O, so a step has four kinds of edges::

    event -> | ASKED | rules | DECIDED | -> instruction -> | DOING | socket, thread, page | DONE |

Armed by `tests.robustness.failpoint_daemon`; the daemon of the product has nothing of this in its way.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
from typing import Any, NamedTuple

from tokenlake.core import events, instructions
from tokenlake.core.events import Event
from tokenlake.core.instructions import Instruction
from tokenlake.wire import engine, peer
from tokenlake_server.loop.driver import Driver, Handle, Sink

log = logging.getLogger(__name__)


class Moment(enum.Enum):
    """The place of an edge: before or after the rules handle an event, before or after an instruction is carried
    out."""

    ASKED = "an event is here, the rules have not seen it"
    DECIDED = "the rules have taken it, nothing of what they say was done"
    DOING = "an instruction is about to be carried out, those before it were"
    DONE = "it was carried out: a frame is with the kernel"


class Edge(NamedTuple):
    """`kind`: the type of the event or instruction, or of the message in it."""

    name: str
    moment: Moment
    kind: type
    meaning: str


EDGES = (
    Edge("prepare.asked", Moment.ASKED, engine.Prepare, "an engine's prepare is here"),
    Edge("prepare.reserved", Moment.DECIDED, engine.Prepare, "slots are reserved, nobody knows"),
    Edge("prepare.announced", Moment.DONE, peer.MarkInFlight, "a directory node knows that this node writes"),
    Edge("prepare.answered", Moment.DONE, engine.Prepared, "the engine knows its slots"),
    Edge("prepare.aborted", Moment.DECIDED, engine.Abort, "the engine gave its slots back, no directory node knows"),
    Edge("prepare.withdrawn", Moment.DONE, peer.ClearInFlight, "a directory node knows that this node writes no more"),
    Edge("commit.asked", Moment.ASKED, engine.Commit, "an engine's commit is here"),
    Edge("commit.decided", Moment.DECIDED, engine.Commit, "the segments are READY here, nobody knows"),
    Edge("commit.answered", Moment.DONE, engine.Committed, "the engine knows that they are READY"),
    Edge("publish.telling", Moment.DOING, peer.Owned, "a directory node is about to be told"),
    Edge("publish.told", Moment.DONE, peer.Owned, "a directory node was told"),
    Edge("publish.asked", Moment.ASKED, peer.Owned, "the directory node: an owner says that it has segments"),
    Edge("publish.entered", Moment.DECIDED, peer.Owned, "the directory node: its directory names the owner"),
    Edge("publish.answered", Moment.DONE, peer.Redundant, "the directory node: a later writer was told of the owner"),
    Edge("publish.taken", Moment.ASKED, peer.Redundant, "the later writer has the directory node's answer"),
    Edge("publish.staged", Moment.DECIDED, peer.Redundant, "the later writer's copy is a cached copy of the owner"),
    Edge("fetch.asked", Moment.ASKED, peer.Lookup, "the owner: a lookup is here"),
    Edge("fetch.leased", Moment.DECIDED, peer.Lookup, "the owner: segments are leased, the reader does not know it"),
    Edge("fetch.answered", Moment.DONE, peer.LookupReply, "the owner: the reader was answered"),
    Edge("fetch.found", Moment.ASKED, peer.LookupReply, "the reader has the owner's answer"),
    Edge(
        "fetch.reserved", Moment.DOING, instructions.StartFetch, "the reader has reserved slots and pulls nothing yet"
    ),
    Edge("fetch.pulling", Moment.ASKED, events.PullRequested, "the source: the reader asks for the bytes"),
    Edge("fetch.pinned", Moment.DOING, instructions.SendBulk, "the source: slots are pinned, nothing is sent"),
    Edge("fetch.sent", Moment.ASKED, events.SendDone, "the source: the bytes are sent, the slots still pinned"),
    Edge("fetch.pulled", Moment.ASKED, events.FetchDone, "the reader has the bytes, not in its index"),
    Edge("fetch.kept", Moment.DECIDED, events.FetchDone, "the reader: they are READY, its engine does not know it"),
    Edge("evict.decided", Moment.DOING, instructions.Stamp, "slots have new owners, the shared page names the former"),
    Edge("evict.stamped", Moment.DONE, instructions.Stamp, "the shared page names the new owners, no more is done"),
    Edge("evict.telling", Moment.DOING, peer.Evicted, "a directory node is about to be told of what is gone"),
    Edge("evict.told", Moment.DONE, peer.Evicted, "a directory node was told"),
    Edge("evict.asked", Moment.ASKED, peer.Evicted, "the directory node: a owner says what is gone"),
    Edge("evict.known", Moment.DECIDED, peer.Evicted, "the directory node: the directory names it no more"),
)
"""Edges of prompts that are stored, read at another node and evicted, in the order in which a segment meets them."""

HANDOVER_EDGES = (
    Edge("handover.offering", Moment.DOING, peer.Offer, "a node is chosen and not asked yet"),
    Edge("handover.offered", Moment.DONE, peer.Offer, "the node was asked"),
    Edge("handover.taken", Moment.ASKED, peer.OfferReply, "the node's answer is here"),
    Edge("handover.staged", Moment.DECIDED, peer.OfferReply, "the copy here is a cached copy of the new owner"),
)
"""Edges of a full node that hands new segments over."""

TAKEOVER_EDGES = (
    Edge("takeover.asked", Moment.ASKED, peer.Offer, "an offer is here"),
    Edge("takeover.reserved", Moment.DECIDED, peer.Offer, "slots are reserved, nothing is pulled yet"),
    Edge("takeover.pulled", Moment.ASKED, events.FetchDone, "the bytes are here, not in the index"),
    Edge("takeover.kept", Moment.DECIDED, events.FetchDone, "the segments are owned here, no other node knows it"),
    Edge("takeover.told", Moment.DONE, peer.Owned, "a directory node was told of the new owner"),
    Edge("takeover.answered", Moment.DONE, peer.OfferReply, "the former owner was answered"),
)
"""Edges of the emptier node that takes them over."""

BY_NAME = {edge.name: edge for edge in (*EDGES, *HANDOVER_EDGES, *TAKEOVER_EDGES)}


def arm(driver: Driver, edge: Edge, left: int) -> None:
    """Make the daemon kill itself when it reaches the edge for the `left`-th time, without closing, flushing or sending
    anything."""

    def reach(moment: Moment, what: Event | Instruction) -> None:
        nonlocal left
        if moment is not edge.moment or type(getattr(what, "message", what)) is not edge.kind:
            return
        left -= 1
        if not left:
            log.critical("failpoint %s: this daemon ends", edge.name)
            os.kill(os.getpid(), signal.SIGKILL)

    def rules(handle: Handle) -> Handle:
        def watched(event: Event, now: float) -> list[Instruction]:
            reach(Moment.ASKED, event)
            decided = handle(event, now)
            reach(Moment.DECIDED, event)
            return decided

        return watched

    def sink(carry_out: Sink) -> Sink:
        def watched(instruction: Any) -> None:
            reach(Moment.DOING, instruction)
            carry_out(instruction)
            reach(Moment.DONE, instruction)

        return watched

    driver.wrap(rules, sink)
    log.warning("failpoint %s is armed: this daemon will end by itself", edge.name)
