"""The state of the node for browsers: at most one JSON per `FRESH_S` and tenant, made while somebody asks for it.

::

    thread of a request --- token --> admin thread: facts of the control loop, explanations --> thread of calculations
                        <-- gzip ---  kept for all who ask within FRESH_S                   <-- JSON, compressed
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tokenlake.core.cluster.serve import SENT_BYTES
from tokenlake.core.cluster.transfers import ARRIVED_BYTES
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import TenantId
from tokenlake.metrics import Metric
from tokenlake.wire.funnel import Funnel
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.cached import Cached
from tokenlake_server.control.messages import activity_message
from tokenlake_server.control.node_parts import NodeParts
from tokenlake_server.control.operations import Admin, of_tenant
from tokenlake_server.control.work import Work
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.page import build
from tokenlake_server.page.history import COUNTED, STEP_S, History, Sample
from tokenlake_server.page.tokens import PageTokens

log = logging.getLogger(__name__)

FRESH_S = 1.8
"""Seconds for which a JSON answers further requests. Browsers ask every 2 s."""
READ_S = 5.0
"""Limit of the seconds in which a JSON is made."""
MAX_VIEWS = 16
"""Limit of the tenants whose pages are kept at a time."""
EXPLAINED_S = 30.0
"""Seconds for which the explanation of a request is kept: other nodes are asked for it."""
MAX_EXPLAINED = 64
WORK_KEY = "\0page"
"""The key of the turns of the page in the thread of calculations, which no tenant can have as its name."""


class Answer(NamedTuple):
    """The JSON of the page for one browser."""

    body: bytes
    """Compressed (gzip)."""
    left_s: float
    """Seconds for which the browser's token is still valid."""


class _View(NamedTuple):
    facts: build.Facts
    body: asyncio.Future[bytes]


class Page:
    """Makes the JSON. `read` is called in the threads of requests, all else in the admin thread."""

    def __init__(
        self, node: NodeParts, bridge: Bridge, admin: Admin, work: Work, thread: AdminThread, tokens: PageTokens
    ) -> None:
        self._node, self._bridge, self._admin, self._work, self._thread = node, bridge, admin, work, thread
        self._tokens = tokens
        self._history = History(node.config.node)
        self._facts = Cached(self._collect, FRESH_S)
        self._earlier: deque[build.Facts] = deque(maxlen=int(build.RATES_S / FRESH_S) + 1)
        """The newest facts, the oldest first."""
        self._views: OrderedDict[str, _View] = OrderedDict()
        """By tenant, empty for all; the one that was asked for last at the end."""
        self._explained: OrderedDict[tuple[str, str], tuple[float, Funnel | None]] = OrderedDict()
        """By tenant and name of a request: when it was explained, and how."""

    def read(self, token: str) -> Answer:
        """The JSON that this token may read. Raises `CredentialRefused`, `Unreachable`, and TimeoutError where the
        daemon takes longer than `READ_S`."""
        granted = self._tokens.check(token)
        try:
            waiting = self._thread.submit(self._body(granted.tenant))
        except RuntimeError:
            raise Unreachable("the daemon is stopping") from None
        try:
            return Answer(waiting.result(READ_S), granted.left_s)
        except concurrent.futures.CancelledError:
            raise Unreachable("the daemon is stopping") from None
        finally:
            waiting.cancel()

    async def watch(self) -> None:
        """Take samples without end."""
        while True:
            try:
                self._history.add(await self._bridge.call(self._sample))
            except Unreachable:
                return
            except Exception:
                log.exception("the page has no sample of the state", extra={"kind": "page"})
            await asyncio.sleep(STEP_S)

    # -- on the control loop

    def _sample(self) -> Sample:
        core, membership = self._node.driver.core, self._node.membership
        return Sample(
            time.monotonic(),
            time.time(),
            tuple(core.counters[metric] for metric in COUNTED),
            core.record.epoch,
            frozenset(core.record.members),
            {name: (each.state, each.reason) for name, each in self._node.peers().items()},
            self._node.engines.engines,
            membership.state.problem,
            {each.path: (each.serving, each.problem) for each in self._node.disk.states},
        )

    def _amounts(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Bytes sent to and received from each other node, and the quotas of tenants."""
        core = self._node.driver.core

        def of(metric: Metric) -> dict[str, int]:
            return {peer: value for (peer,), value in core.counters.by_labels(metric).items()}

        quotas = {str(tenant): core.store.regions.quota(tenant) for tenant in map(TenantId, core.config.quotas)}
        return of(SENT_BYTES), of(ARRIVED_BYTES), quotas

    # -- in the admin thread

    async def _collect(self) -> build.Facts:
        status, cluster, recent = await asyncio.gather(
            self._admin.status.get(), self._admin.cluster.get(), self._admin.recent.get()
        )
        facts = build.Facts(time.monotonic(), status, cluster, recent, *await self._bridge.call(self._amounts))
        self._earlier.append(facts)
        return facts

    async def _body(self, tenant: str) -> bytes:
        facts = await self._facts.get()
        view = self._views.get(tenant)
        if view is None or view.facts is not facts:
            view = self._views[tenant] = _View(facts, asyncio.ensure_future(self._make(facts, tenant)))
            if len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(tenant)
        return await asyncio.shield(view.body)

    async def _make(self, facts: build.Facts, tenant: str) -> bytes:
        before = next((each for each in self._earlier if facts.at - each.at <= build.RATES_S), facts)
        recent = [each for each in facts.recent if tenant in ("", each.tenant)]
        history = self._history
        events = history.events(build.MAX_EVENTS, of_all=not tenant)

        def begin() -> tuple[build.Facts, pb.GetActivityResponse]:
            shown = facts if not tenant else facts._replace(status=of_tenant(facts.status, tenant))
            return shown, activity_message(recent, build.MAX_PREFIXES)

        shown, activity = await self._work.run(WORK_KEY, begin)
        del activity.calls[build.MAX_CALLS :]
        funnels = await self._explain([(call.tenant, call.request) for call in activity.calls])
        rates = history.rates()

        def end() -> bytes:
            made = build.document(
                shown, before if before is not facts else None, tenant, rates, events, activity, funnels
            )
            return gzip.compress(msgspec.json.encode(made), 5, mtime=0)

        return await self._work.run(WORK_KEY, end)

    async def _explain(self, requests: Sequence[tuple[str, str]]) -> list[Funnel | None]:
        now = time.monotonic()
        old = float("-inf"), None
        missing = [each for each in dict.fromkeys(requests) if now - self._explained.get(each, old)[0] > EXPLAINED_S]
        found = await asyncio.gather(*(self._explained_now(*each) for each in missing))
        for request, funnel in zip(missing, found, strict=True):
            self._explained[request] = now, funnel
            self._explained.move_to_end(request)
        answers = [self._explained.get(each, old)[1] for each in requests]
        while len(self._explained) > MAX_EXPLAINED:
            self._explained.popitem(last=False)
        return answers

    async def _explained_now(self, tenant: str, request: str) -> Funnel | None:
        try:
            funnel = (await self._bridge.explain(tenant, request)).funnel
        except TokenLakeError:
            return None
        # A request that is forgotten may be the beginning of the name of another one.
        return funnel if funnel is not None and funnel.request == request else None
