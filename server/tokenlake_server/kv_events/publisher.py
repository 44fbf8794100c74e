"""Publishes the log of changes (`tokenlake/memory/changes.py`) to routers, in the admin thread.

::

    control loop, receiving threads        admin thread
      offer: contents -----> inbox ------> Blocks -> events -> message -> Replay, Sockets
      store: changes ------> log --------> one round each POLL_S, PART changes at a time

On the control loop run only `offer` and, when the log has overtaken the admin thread, `_walk`. A message has the events
of at most `PART` changes. Its sequence number begins with the time of the daemon's start, so that a reader which knows
the messages of an earlier start notices that it missed some.

All readers are told all blocks anew, behind an `AllBlocksCleared`, when the daemon starts, when one of them subscribes,
when one asks for messages that are not kept any more, and when the log has overtaken this thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tokenlake.config import KvEventStream, ServerConfig
from tokenlake.errors import ConfigurationError
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.log_lines import one_line
from tokenlake.memory import Cursor, State
from tokenlake.metrics import Level, Metric
from tokenlake_server.engines.contents import Contents, StreamState
from tokenlake_server.kv_events.blocks import MAX_PENDING_BYTES, Blocks, charge_of
from tokenlake_server.kv_events.encoding import AllBlocksCleared, Event, encode
from tokenlake_server.kv_events.listener import MAX_READERS, MAX_READERS_OF_ALL, MAX_READERS_OF_ONE, Room
from tokenlake_server.kv_events.replay import Replay
from tokenlake_server.kv_events.sockets import Sockets
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.loop.driver import Driver

log = logging.getLogger(__name__)

T = TypeVar("T")

SEGMENTS = Metric(
    "tokenlake_kv_event_segments", "Segments of this node that routers were told of", "tenant", "model", kind="gauge"
)
MESSAGES = Metric(
    "tokenlake_kv_event_messages", "Messages with KV events since the start", "tenant", "model", kind="gauge"
)
RESTATEMENTS = Metric(
    "tokenlake_kv_event_restatements",
    "Times at which routers were told all segments anew, since the start",
    "tenant",
    "model",
    kind="gauge",
)
WITHOUT_TOKENS = Metric(
    "tokenlake_kv_event_without_tokens",
    "Segments that were not published: their tokens were not known",
    "tenant",
    "model",
    kind="gauge",
)
OF_OTHER_LAYOUTS = Metric(
    "tokenlake_kv_event_of_other_layouts",
    "Segments that were not published: of another layout",
    "tenant",
    "model",
    kind="gauge",
)
DROPPED = Metric(
    "tokenlake_kv_event_dropped_contents",
    "Contents of segments that were dropped, because others of the tenant, up to its part of 32 MiB, waited to be "
    "published: their segments are not published",
    "tenant",
    kind="gauge",
)
LONG = Metric(
    "tokenlake_kv_event_long_contents",
    "Contents of segments that were dropped, because they exceed the limit of a segment: their segments are not "
    "published",
    "tenant",
    kind="gauge",
)
REFUSED = Metric(
    "tokenlake_kv_event_refused_replays",
    "Requests of routers for a replay that were malformed, or beyond the 8 at a time",
    "tenant",
    "model",
    kind="gauge",
)
READERS = Metric(
    "tokenlake_kv_event_readers",
    "Connections of routers that read KV events or replays",
    "tenant",
    "model",
    kind="gauge",
)
REFUSED_READERS = Metric(
    "tokenlake_kv_event_refused_readers",
    f"Connections to the streams of KV events that were closed since the start: of users that may not read, beyond the "
    f"limits ({MAX_READERS} at a socket, {MAX_READERS_OF_ONE} of one user or address, {MAX_READERS_OF_ALL} in all), or "
    f"of no use",
    "tenant",
    "model",
    kind="gauge",
)

POLL_S = 0.02
"""Seconds between two rounds without work."""
PART = 24
"""Limit of the changes in one message, which takes some 30 KiB and half a millisecond of the admin thread."""
WALK_SLOTS = 512
RESTATE_S = 0.5
RESTATE_REST = 20
"""Between two times at which all blocks are published anew are at least `RESTATE_S` seconds, and at least
`RESTATE_REST` times the seconds that the first of them took."""
RESTATE_PAUSE_S = 0.001
"""Seconds between two messages that tell the blocks anew, so that readers keep up."""
MAX_REPLAY_BYTES = 16 << 20
"""Limit of the bytes of the messages that a stream keeps: about 13,000 stored segments of 256 tokens."""
FULL_STREAMS = 2
"""Number of streams that have all of `MAX_REPLAY_BYTES` and `MAX_PENDING_BYTES`; more of them share as much."""
MAX_INBOX_BYTES = 32 << 20
"""Limit of the contents that wait for a round, in equal parts for the tenants with streams; further ones are dropped,
and their segments are not published."""
MAX_UNPUBLISHED = 16
"""Limit of the names of models of each tenant that are remembered because no stream has them."""
START_S = 20.0
ROOT = 0


class _Stream:
    """One stream: the segments of a tenant and a model."""

    def __init__(self, config: KvEventStream, sequence: int, streams: int) -> None:
        """`streams`: the number of streams of the daemon, which share the memory of `FULL_STREAMS`."""
        self.config = config
        part = max(1.0, streams / FULL_STREAMS)
        pending = int(MAX_PENDING_BYTES / part)
        self.blocks = Blocks(config.model, config.block_tokens, config.medium, pending)
        self.replay = Replay(int(MAX_REPLAY_BYTES / part))
        self.sequence = sequence
        self.messages = 0
        self.wanted = True
        """True while all blocks have to be published anew."""
        self.restated = 0
        self.next_restatement = float("-inf")
        self.sockets: Sockets | None = None

    def send(self, events: Sequence[Event], *, clears: bool = False) -> None:
        payload = encode(events, self.config.encoding)
        self.replay.add(self.sequence, payload, clears=clears)
        assert self.sockets is not None
        self.sockets.published()
        self.sequence += 1
        self.messages += 1


class KvEvents(Contents):
    """The streams of a daemon. Made and closed on the control loop."""

    def __init__(
        self, config: ServerConfig, thread: AdminThread, loop: asyncio.AbstractEventLoop, driver: Driver
    ) -> None:
        """Raises `ConfigurationError` for an address that cannot be opened."""
        self._thread = thread
        self._loop = loop
        self._driver = driver
        self._log = driver.core.store.changes
        self._at = self._log.newest
        first = driver.core.config.incarnation // 1000
        self._streams: dict[str, list[_Stream]] = {}
        for stream in config.kv_events:
            self._streams.setdefault(stream.tenant, []).append(_Stream(stream, first, len(config.kv_events)))
        self._models = {tenant: tuple(each.config.model for each in own) for tenant, own in self._streams.items()}
        self._inbox: deque[tuple[int, str, list[SegmentKey], Sequence[bytes]]] = deque()
        """Contents, with the number of the newest change before they were offered."""
        self._inbox_bytes = dict.fromkeys(self._streams, 0)
        """By tenant, the bytes that are charged for its contents there."""
        self._inbox_part = MAX_INBOX_BYTES // max(1, len(self._streams))
        self._inbox_lock = threading.Lock()
        self._dropped = dict.fromkeys(self._streams, 0)
        """By tenant, the number of contents that were dropped because too many waited."""
        self._long = dict.fromkeys(self._streams, 0)
        """By tenant, the number of contents that were dropped because they exceed the limit of one segment."""
        self._room = Room()
        self._unpublished: dict[str, dict[str, None]] = {tenant: {} for tenant in self._streams}
        """By tenant, the names under which its engines serve models that no stream has."""
        self._run: asyncio.Task[None] | None = None
        self._thread.submit(self._start()).result(START_S)

    # -- from any thread

    def models(self, tenant: str) -> tuple[str, ...]:
        """The models of a tenant whose segments are published."""
        return self._models.get(tenant, ())

    def offer(self, tenant: str, keys: list[SegmentKey], contents: Sequence[bytes], limit: int) -> None:
        """See `Contents`."""
        if tenant not in self._streams or not contents:
            return
        long = [content for content in contents if len(content) > limit]
        if long:
            self._refuse_long(tenant, len(long), max(map(len, long)), limit)
            contents = [b"" if len(content) > limit else content for content in contents]
        size = sum(map(charge_of, contents))
        with self._inbox_lock:
            if self._inbox_bytes[tenant] + size <= self._inbox_part:
                self._inbox_bytes[tenant] += size
                self._inbox.append((self._log.newest, tenant, keys[: len(contents)], contents))
                return
            first = not self._dropped[tenant]
            self._dropped[tenant] += len(contents)
        if first:
            log.warning(
                "segments of tenant '%s' are not published to routers: %d MiB of tokens wait for the thread that "
                "publishes (further ones are counted by %s)",
                tenant,
                self._inbox_part >> 20,
                DROPPED.name,
            )

    def _refuse_long(self, tenant: str, count: int, size: int, limit: int) -> None:
        with self._inbox_lock:
            first = not self._long[tenant]
            self._long[tenant] += count
        if first:
            log.warning(
                "a segment of tenant '%s' is not published to routers: its engine sent %d bytes of tokens and names, "
                "the limit is %d for a segment of this size (further ones are counted by %s): shorten the names of the "
                "model and its adapters, or set 'segment_tokens' lower",
                tenant,
                size,
                limit,
                LONG.name,
            )

    def contents(self, tenant: str, keys: Sequence[SegmentKey], limit: int) -> tuple[bytes, ...]:
        """The contents of READY segments, to be sent to another node with their bytes; empty where they are not known.
        `limit`: most bytes in all. May be called from any thread."""
        found: list[bytes] = []
        waiting: dict[SegmentKey, bytes] | None = None
        for key in keys if tenant in self._streams else ():
            content = self._in_blocks(tenant, key)
            if not content:
                waiting = self._in_inbox(tenant) if waiting is None else waiting
                # The admin thread may have taken it meanwhile.
                content = waiting.get(key) or self._in_blocks(tenant, key)
            limit -= len(content)
            if limit < 0:
                break
            found.append(content)
        return tuple(found) if any(found) else ()

    def _in_blocks(self, tenant: str, key: SegmentKey) -> bytes:
        return next((content for each in self._streams[tenant] if (content := each.blocks.content(key))), b"")

    def _in_inbox(self, tenant: str) -> dict[SegmentKey, bytes]:
        """The contents that the admin thread has not taken yet, which are those of the last `POLL_S` or so."""
        with self._inbox_lock:
            offers = [offer for offer in self._inbox if offer[1] == tenant]
        return {key: content for _, _, keys, contents in offers for key, content in zip(keys, contents, strict=False)}

    @property
    def endpoints(self) -> list[tuple[str, str]]:
        """For each stream, in the order of the settings, the ZMQ endpoints of its events and of its replays."""
        return [each.sockets.endpoints for each in self._each() if each.sockets is not None]

    def unpublished(self, tenant: str, model: str) -> None:
        """See `Contents`."""
        names, model = self._unpublished.get(tenant), one_line(model)
        if names is None or model in names or len(names) >= MAX_UNPUBLISHED:
            return
        names[model] = None
        log.warning(
            "routers are told of no segment of the engines of tenant '%s' that serve '%s': its streams of KV events "
            "are for '%s'",
            tenant,
            model,
            "', '".join(self.models(tenant)),
        )

    def streams(self) -> list[StreamState]:
        """See `Contents`."""
        return [self._state(each) for each in self._each()]

    def _state(self, stream: _Stream) -> StreamState:
        config, blocks, problem, cure = stream.config, stream.blocks, "", ""
        names = self._unpublished[config.tenant]
        if blocks.uneven:
            problem = f"segments have {blocks.uneven} tokens, no multiple of 'block_tokens' = {config.block_tokens}"
            cure = "set 'block_tokens' of the stream to the blocks of the router, a divisor of 'segment_tokens'"
        elif names and not blocks.published:
            listed = ", ".join(f"'{name}'" for name in names)
            problem = f"no engine serves '{config.model}'; engines of tenant '{config.tenant}' serve {listed}"
            cure = (
                "set 'model' of the stream to that name (the first of vLLM's `--served-model-name`, or `--model`), or "
                "add a stream for it"
            )
        readers = 0 if stream.sockets is None else stream.sockets.readers
        return StreamState(config.tenant, config.model, config.block_tokens, blocks.published, readers, problem, cure)

    def gauges(self) -> list[Level]:
        """See `Contents`."""
        found = [Level(DROPPED, (tenant,), count) for tenant, count in self._dropped.items()]
        found += [Level(LONG, (tenant,), count) for tenant, count in self._long.items()]
        for stream in self._each():
            blocks, labels = stream.blocks, (stream.config.tenant, stream.config.model)
            found += (
                Level(SEGMENTS, labels, blocks.published),
                Level(MESSAGES, labels, stream.messages),
                Level(RESTATEMENTS, labels, stream.restated),
                Level(WITHOUT_TOKENS, labels, blocks.unknown),
                Level(OF_OTHER_LAYOUTS, labels, blocks.other_layout),
            )
            if (sockets := stream.sockets) is not None:
                found += (
                    Level(REFUSED, labels, sockets.shared.refused),
                    Level(READERS, labels, sockets.readers),
                    Level(REFUSED_READERS, labels, sockets.refused_readers),
                )
        return found

    def _each(self) -> Iterator[_Stream]:
        for own in self._streams.values():
            yield from own

    # -- in the admin thread

    async def _start(self) -> None:
        for each in self._each():
            config = each.config
            users = frozenset((ROOT, os.geteuid(), *config.uids))
            assert config.endpoint is not None
            try:
                each.sockets = Sockets(config.topic, config.endpoint, config.replay, users, each.replay, self._room)
            except ConfigurationError:
                self._close_sockets()
                raise
            _say_who_reads(config, each.sockets.endpoints, users)
        self._run = asyncio.get_running_loop().create_task(self._rounds())

    async def _rounds(self) -> None:
        while True:
            try:
                pause_s = await self._round()
            except Exception:
                log.exception("KV events could not be published", extra={"kind": "kv_events"})
                pause_s = RESTATE_S
                for each in self._each():
                    each.wanted = True
            await asyncio.sleep(pause_s)

    async def _round(self) -> float:
        """One round; returns the seconds until the next one."""
        changes = self._log.after(self._at, PART)
        now = time.monotonic()
        if changes is None:
            await self._overtaken()
            changes = []
        for change in changes:
            self._take_offers(change.sequence - 1)
            if change.ring is None:
                for each in self._streams.get(change.tenant, ()):
                    if change.stored:
                        each.blocks.stored(change.key, now)
                    else:
                        each.blocks.gone(change.key)
            self._at = change.sequence
        self._take_offers(self._at)
        for each in self._each():
            await self._tell(each, now)
        return 0.0 if len(changes) == PART else POLL_S

    def _take_offers(self, at: int) -> None:
        """Take the contents that were offered before the change behind `at`: whether a segment was READY when its
        content was offered is known from the changes up to then."""
        while self._inbox and self._inbox[0][0] <= at:
            _, tenant, keys, contents = self._inbox[0]
            for each in self._streams[tenant]:
                for key, content in zip(keys, contents, strict=False):
                    each.blocks.offer(key, content)
            # Last, because another thread may look for a content.
            with self._inbox_lock:
                self._inbox.popleft()
                self._inbox_bytes[tenant] -= sum(map(charge_of, contents))

    async def _tell(self, stream: _Stream, now: float) -> None:
        sockets = stream.sockets
        assert sockets is not None
        stream.wanted |= sockets.shared.wanted or stream.blocks.restate_due
        sockets.shared.wanted = False
        events = stream.blocks.take()
        for start in range(0, len(events), PART):
            stream.send(events[start : start + PART])
        if stream.wanted and now >= stream.next_restatement:
            stream.wanted = False
            stream.restated += 1
            for part in stream.blocks.restate(PART):
                for start in range(0, len(part), PART):
                    stream.send(part[start : start + PART], clears=isinstance(part[start], AllBlocksCleared))
                await asyncio.sleep(RESTATE_PAUSE_S)
            ended = time.monotonic()
            stream.next_restatement = ended + max(RESTATE_S, RESTATE_REST * (ended - now))

    async def _overtaken(self) -> None:
        """The log has overtaken this thread: look at all segments."""
        at = self._log.newest
        ready = {tenant: set[SegmentKey]() for tenant in self._streams}
        cursor: Cursor | None = Cursor()
        while cursor is not None:
            start = cursor
            found, cursor = await self._on_loop(lambda start=start: self._walk(start))  # type: ignore[misc]
            for owner, key in found:
                if owner in ready:
                    ready[owner].add(key)
        # Changes during the walk follow in the log; each of them leads to the same state from either side of it.
        self._take_offers(self._log.newest)
        self._at = at
        now = time.monotonic()
        for tenant, own in self._streams.items():
            for each in own:
                each.blocks.only(ready[tenant], now)
        log.warning("KV events: changes were missed, the routers are told all blocks anew")

    def _walk(self, cursor: Cursor) -> tuple[list[tuple[TenantId, SegmentKey]], Cursor | None]:
        segments, after = self._driver.core.store.walk(cursor, WALK_SLOTS)
        return [(each.tenant, each.key) for each in segments if each.state is State.READY], after

    async def _on_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    # -- the end

    async def close(self) -> None:
        """End the streams, and close their sockets."""
        await asyncio.wrap_future(self._thread.submit(self._stop()))

    async def _stop(self) -> None:
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._each():
            if each.sockets is not None:
                each.sockets.close()


def _say_who_reads(config: KvEventStream, endpoints: tuple[str, str], users: frozenset[int]) -> None:
    where = " and ".join(each for each in endpoints if each)
    if config.open_to_all:
        log.warning(
            "KV events of tenant '%s': each process of each machine that reaches %s reads the tokens of its prompts "
            "for '%s', without encryption: 'beyond_loopback' is set",
            config.tenant,
            where,
            config.model,
        )
    else:
        named = ", ".join(map(str, sorted(users)))
        log.info(
            "KV events of tenant '%s' for '%s', with the tokens of prompts, are for uid %s at %s",
            config.tenant,
            config.model,
            named,
            where,
        )
