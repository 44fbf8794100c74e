"""Makes spans of the events and instructions of the rules, which know nothing of them.

::

    the engine's span
      tokenlake.match               a Match until its answer
        tokenlake.lookup            a Lookup until the reply of the other node
          tokenlake.lookup          at that node: the Lookup and its reply
      tokenlake.lease               from the answer of the match until the engine has given back all segments
      tokenlake.fetch               a Fetch until its answer
        tokenlake.transfer          a StartFetch, or a DiskRead, until FetchDone
          tokenlake.send            at the other node: a PullRequested until SendDone
      tokenlake.write               a Prepare until all its segments are committed or given up

Lookups and transfers belong to the request that the rules handle when they order them, or to the newest one under way
of the same tenant and name. Attributes hold numbers, names of nodes, tenants and requests, and codes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from tokenlake.core import NodeCore, events
from tokenlake.core.engines.sessions import Process
from tokenlake.core.instructions import AbortFetch, Answer, DiskRead, Instruction, SendBulk, SendToPeer, StartFetch
from tokenlake.core.report.account import Account
from tokenlake.keys import KEY_BYTES
from tokenlake.trace import NO_TRACE, checked
from tokenlake.wire import Code, engine, peer
from tokenlake_server.loop.driver import Handle
from tokenlake_server.tracing.export import Export
from tokenlake_server.tracing.works import Attributes, Table, Work, Works

MAX_TOLD, MAX_REQUESTS = 4096, 4096
"""Limits of the contexts that were told and whose message has not come, and of the requests whose context is known for
later fetches and stores."""
Key = TypeVar("Key")


class Observer:
    """Watches the rules of one node. On the control loop."""

    def __init__(self, export: Export, core: NodeCore, tell: Callable[[str, peer.Traced], None]) -> None:
        """`tell`: sends a message to another node before the instructions of the present event are carried out."""
        self._export = export
        self._core = core
        self._tell = tell
        self._works = Works(export, core.config.node)
        self._told: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        """By connection and id of the match that is sent next."""
        self._told_by_peers: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._requests: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        """By session and name of a request: the span of its caller."""
        self._asked: Table = {}
        """By connection and id: the requests of engines that are not answered."""
        self._leases: Table = {}
        """By session and number, the leases of traced matches that are not given back."""
        self._lookups: Table = {}
        self._serving: Table = {}
        self._transfers: Table = {}
        self._writes: Table = {}
        self._sends: Table = {}
        self._current: Work | None = None
        self._committing: Work | None = None
        """The request of an engine, and the write of a Commit, that the rules handle now."""
        self._before: dict[type, Callable[[Any], None]] = {
            events.Requested: self._requested,
            events.PeerSent: self._peer_sent,
            events.PullRequested: self._pull_requested,
            events.FetchDone: self._fetch_done,
            events.SendDone: self._send_done,
        }
        self._after: dict[type, Callable[[Any], None]] = {
            events.Requested: self._after_request,
            events.ProcessGone: self._after_process,
        }
        self._of_requests: dict[type, Callable[[Process, Any], Work | None]] = {
            engine.Match: self._match,
            engine.Fetch: self._fetch,
            engine.Prepare: self._prepare,
        }

    # -- around the rules

    def watching(self, handle: Handle) -> Handle:
        """`handle` of the rules, with spans for what it is given and returns."""

        def watched(event: events.Event, now: float) -> list[Instruction]:
            before = self._before.get(type(event))
            if before is not None:
                before(event)
            try:
                out = handle(event, now)
                if len(self._works):
                    out = [self._instruction(each) for each in out]
                    after = self._after.get(type(event))
                    if after is not None:
                        after(event)
                return out
            except Exception as error:
                if self._current is not None:
                    self._works.end(self._current, {"outcome": "failed"}, type(error).__name__)
                raise
            finally:
                self._current = self._committing = None

        return watched

    def traced(self, connection: int, message: engine.Traced) -> None:
        """A process told to which trace its next match belongs."""
        if trace := checked(message.trace):
            _remember(self._told, (connection, message.match), trace, MAX_TOLD)

    def traced_by_peer(self, node: str, message: peer.Traced) -> None:
        """Another node told to which trace its next lookup belongs."""
        if trace := checked(message.trace):
            _remember(self._told_by_peers, (node, message.call), trace, MAX_TOLD)

    # -- requests of engines

    def _requested(self, event: events.Requested) -> None:
        message: Any = event.message
        if isinstance(message, engine.Commit):
            self._committing = self._writes.get(message.write)
            return
        begin = self._of_requests.get(type(message))
        process = self._core.process(event.connection) if begin is not None else None
        if begin is None or process is None:
            return
        work = self._current = begin(process, message)
        if work is not None:
            self._works.belongs(work, process.session.tenant, message.request)
            self._works.name(work)

    def _match(self, process: Process, message: engine.Match) -> Work | None:
        context = self._told.pop((process.connection, message.id), NO_TRACE) if self._told else NO_TRACE
        if context and message.request:
            _remember(self._requests, (process.session.id, message.request), context, MAX_REQUESTS)
        return self._begin("match", context, process, message.id, len(message.keys) // KEY_BYTES)

    def _fetch(self, process: Process, message: engine.Fetch) -> Work | None:
        lease = self._leases.get((process.session.id, message.lease))
        context = NO_TRACE if lease is None else lease.parent
        return self._begin("fetch", context, process, message.id, max(0, message.stop - message.start))

    def _prepare(self, process: Process, message: engine.Prepare) -> Work | None:
        context = self._requests.get((process.session.id, message.request), NO_TRACE) if self._requests else NO_TRACE
        return self._begin("write", context, process, message.id, len(message.keys) // KEY_BYTES)

    def _begin(self, name: str, context: bytes, process: Process, number: int, asked: int) -> Work | None:
        if not context and not self._export.roots:
            return None
        key = process.connection, number
        return self._works.begin(name, SpanKind.SERVER, context, self._asked, key, {"segments.asked": asked})

    def _answered(self, answer: Answer) -> None:
        message = answer.message
        if isinstance(message, engine.Committed):
            self._committed(message)
            return
        work = self._asked.get((answer.connection, message.id))
        if work is None:
            return
        self._works.answered(work)
        if isinstance(message, engine.Matched):
            self._matched(work, answer.connection, message)
        elif isinstance(message, engine.Fetched):
            here = message.codes.count(Code.LOCAL)
            outcome = _outcome(here, len(message.codes))
            self._works.end(work, {"segments.here": here, "outcome": outcome, **_others(message.codes)})
        elif isinstance(message, engine.Prepared):
            self._prepared(work, answer.connection, message)
        else:
            self._works.end(work, {"outcome": "refused"}, "refused")

    def _matched(self, work: Work, connection: int, message: engine.Matched) -> None:
        account = self._core.account(work.tenant, work.request) if work.request else None
        hits, elsewhere = message.hits, message.codes.count(Code.REMOTE)
        outcome = _outcome(hits, len(message.codes))
        if account is not None:
            sums = account.sums()
            work.note({"tokens.asked": sums.asked, "tokens.found": sums.held + sums.supplied.total()})
            _note_missed(work, account)
        self._works.end(work, {"segments.found": hits, "segments.elsewhere": elsewhere, "outcome": outcome})
        process = self._core.process(connection)
        if message.lease and process is not None:
            key = process.session.id, message.lease
            found = {"segments.found": hits}
            lease = self._works.begin("lease", SpanKind.INTERNAL, work.parent, self._leases, key, found)
            if lease is not None:
                self._works.belongs(lease, work.tenant, work.request)
                lease.session, lease.account = process.session, account

    def _prepared(self, work: Work, connection: int, message: engine.Prepared) -> None:
        reserved = message.codes.count(Code.RESERVED)
        work.note({"segments.reserved": reserved, **_others(message.codes)})
        process = self._core.process(connection)
        if not message.write or process is None:
            refused = any(Code(code).refused for code in set(message.codes))
            self._works.end(work, {"outcome": "refused" if refused else "stored already"})
            return
        self._works.move(work, self._writes, message.write)
        work.session, work.left = process.session, reserved

    def _committed(self, message: engine.Committed) -> None:
        work = self._committing
        if work is not None:
            committed, pending = message.codes.count(Code.COMMITTED), message.codes.count(Code.RESERVED)
            work.committed += committed
            work.left -= len(message.codes) - pending
            if work.left <= 0:
                self._end_write(work)

    def _end_write(self, work: Work) -> None:
        outcome = "committed" if work.committed and work.left <= 0 else "partial" if work.committed else "given up"
        self._works.end(work, {"segments.committed": work.committed, "outcome": outcome})

    # -- leases and writes that have ended

    def _after_request(self, event: events.Requested) -> None:
        message = event.message
        if isinstance(message, engine.Release):
            process = self._core.process(event.connection)
            for number, _, _ in message.ranges if process is not None else ():
                lease = self._leases.get((process.session.id, number)) if process is not None else None
                if lease is not None:
                    self._look(lease)
        elif isinstance(message, engine.Abort) and message.write in self._writes:
            self._look(self._writes[message.write])

    def _look(self, work: Work) -> None:
        """End the span of a lease or a write that the rules do not have any more."""
        session = work.session
        if session is None:
            return
        if work.table is self._leases and work.key[1] not in session.leases:
            if work.account is not None:
                sums = work.account.sums()
                work.note({"tokens.asked": sums.asked, "tokens.engine_had": sums.engine_had})
                work.note({f"tokens.supplied.{source}": count for source, count in sums.supplied.items()})
                _note_missed(work, work.account)
            self._works.end(work, {"outcome": "given back"})
        elif work.table is self._writes and work.key not in session.writes:
            self._end_write(work)

    def _after_process(self, event: events.ProcessGone) -> None:
        for work in [each for (connection, _), each in self._asked.items() if connection == event.connection]:
            self._works.end(work, {"outcome": "engine gone"}, "engine_gone")
        for work in [*self._leases.values(), *self._writes.values()]:
            self._look(work)

    # -- what the rules order

    def _instruction(self, instruction: Instruction) -> Instruction:
        """Begin or end the spans of an instruction. Returns the instruction to carry out, with the context of its
        span."""
        if isinstance(instruction, SendToPeer):
            self._sent(instruction)
        elif isinstance(instruction, Answer):
            self._answered(instruction)
        elif isinstance(instruction, StartFetch):
            work = self._transfer(instruction, SpanKind.CLIENT, instruction.node)
            return instruction if work is None else replace(instruction, trace=work.context)
        elif isinstance(instruction, DiskRead):
            self._transfer(instruction, SpanKind.INTERNAL, f"disk {instruction.device}")
        elif isinstance(instruction, AbortFetch) and instruction.fetch in self._transfers:
            self._transfers[instruction.fetch].note({"deadline_missed": True})
        elif isinstance(instruction, SendBulk) and instruction.stream in self._sends:
            count = instruction.codes.count(Code.LOCAL)
            sent: Attributes = {"segments.sent": count, "bytes": count * instruction.slot_bytes}
            self._sends[instruction.stream].note({**sent, "outcome": _outcome(count, len(instruction.codes))})
        return instruction

    def _caller(self, tenant: str, request: str) -> Work | None:
        """The request of an engine for which the rules order a lookup or a transfer."""
        current = self._current
        if current is not None and (current.tenant, current.request) == (tenant, request):
            return current
        return self._works.named(tenant, request)

    def _sent(self, instruction: SendToPeer) -> None:
        message = instruction.message
        if isinstance(message, peer.Lookup):
            above = self._caller(message.tenant, message.request)
            if above is not None:
                asked = len(message.keys) // KEY_BYTES
                attributes: Attributes = {"peer": instruction.node, "segments.asked": asked}
                work = self._works.begin(
                    "lookup", SpanKind.CLIENT, above.context, self._lookups, message.call, attributes, of=above
                )
                if work is not None:
                    self._tell(instruction.node, peer.Traced(message.call, work.context))
        elif isinstance(message, peer.LookupReply):
            work = self._serving.get((instruction.node, message.call))
            if work is not None:
                self._works.end(work, _found(message))

    def _transfer(self, instruction: StartFetch | DiskRead, kind: SpanKind, source: str) -> Work | None:
        above = self._caller(instruction.tenant, instruction.request)
        if above is None or not instruction.keys:
            return None
        attributes: Attributes = {"source": source, "segments.asked": len(instruction.keys) // KEY_BYTES}
        work = self._works.begin(
            "transfer", kind, above.context, self._transfers, instruction.fetch, attributes, of=above
        )
        if work is not None:
            work.slot_bytes = instruction.slot_bytes
        return work

    # -- what comes from other nodes and threads

    def _peer_sent(self, event: events.PeerSent) -> None:
        message = event.message
        if isinstance(message, peer.LookupReply):
            work = self._lookups.get(message.call)
            if work is not None:
                self._works.end(work, _found(message))
        elif isinstance(message, peer.Lookup) and self._told_by_peers:
            context = self._told_by_peers.pop((event.node, message.call), NO_TRACE)
            if context:
                key = event.node, message.call
                attributes: Attributes = {"peer": event.node, "segments.asked": len(message.keys) // KEY_BYTES}
                self._works.begin("lookup", SpanKind.SERVER, context, self._serving, key, attributes)

    def _pull_requested(self, event: events.PullRequested) -> None:
        if event.trace:
            attributes: Attributes = {"peer": event.node, "segments.asked": len(event.keys) // KEY_BYTES}
            self._works.begin("send", SpanKind.SERVER, event.trace, self._sends, event.stream, attributes)

    def _fetch_done(self, event: events.FetchDone) -> None:
        work = self._transfers.get(event.fetch)
        if work is not None:
            arrived = event.codes.count(Code.LOCAL)
            outcome = _outcome(arrived, len(event.codes))
            nbytes = arrived * work.slot_bytes
            error = "" if arrived == len(event.codes) else "incomplete"
            came: Attributes = {"segments.arrived": arrived, "bytes": nbytes, "outcome": outcome}
            self._works.end(work, {**came, **_others(event.codes)}, error)

    def _send_done(self, event: events.SendDone) -> None:
        if event.stream in self._sends:
            self._works.end(self._sends[event.stream], {})


def _remember(table: OrderedDict[Key, bytes], key: Key, context: bytes, limit: int) -> None:
    table[key] = context
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)


def _outcome(found: int, asked: int) -> str:
    return "hit" if found == asked else "partial" if found else "miss"


def _others(codes: bytes) -> dict[str, int]:
    """The numbers of segments by code, without those that other attributes count."""
    counted = (Code.LOCAL, Code.RESERVED)
    return {f"segments.{Code(code).name.lower()}": codes.count(code) for code in set(codes) if code not in counted}


def _found(reply: peer.LookupReply) -> Attributes:
    """The attributes of a lookup that was answered."""
    leased = reply.codes.count(Code.LOCAL)
    found: Attributes = {"segments.leased": leased, "outcome": _outcome(leased, len(reply.codes))}
    redirect: Attributes = {"redirect": reply.redirect} if reply.redirect else {}
    return {**found, **_others(reply.codes), **redirect}


def _note_missed(work: Work, account: Account) -> None:
    """Add the tokens that were missed, by the reasons of `tokenlake explain`."""
    missed = account.missed(account.sums())
    work.note({f"tokens.missed.{reason}": tokens for reason, tokens in missed.items()})
