"""The streams of a daemon: contents and requests that they refuse, and the messages that they keep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq

from tests.robustness.live import wait_until
from tests.server.kv_events.scene import MODEL, Stream
from tests.server.scene import tenants_text
from tokenlake.config import ServerConfig, load_config
from tokenlake.config.values import KvEventStream
from tokenlake.core import NodeCore
from tokenlake.identity import SegmentKey
from tokenlake_server.kv_events import listener, publisher
from tokenlake_server.kv_events.blocks import ENTRY_BYTES
from tokenlake_server.kv_events.publisher import (
    DROPPED,
    LONG,
    MAX_INBOX_BYTES,
    READERS,
    REFUSED,
    REFUSED_READERS,
    KvEvents,
)
from tokenlake_server.kv_events.replay import Replay
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.loop.driver import Driver
from tokenlake_server.start.daemon import core_config

pytest.importorskip("zmq")


CONTENT = bytes(MAX_INBOX_BYTES // 2 + 1)


def settings(tables: str) -> ServerConfig:
    text = f'memory = "1MiB"\n{tables}'
    return load_config(toml_text=text, environ={}, flags={"node": "a", "listen": "127.0.0.1:0"}, uid=0).config


@contextlib.asynccontextmanager
async def published(stream: Stream, config: ServerConfig | None = None) -> AsyncIterator[KvEvents]:
    config, loop, thread = config or settings(stream.toml()), asyncio.get_running_loop(), AdminThread()
    driver = Driver(NodeCore(core_config(config, 1)), loop, lambda event, error: None)
    made = KvEvents(config, thread, loop, driver)
    try:
        yield made
    finally:
        await made.close()
        await asyncio.to_thread(thread.close)


def count(events: KvEvents, name: str) -> float:
    return sum(each.value for each in events.gauges() if each.metric.name == name)


async def test_dropped_contents(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream("a")

    async with published(stream) as events:
        assert count(events, DROPPED.name) == 0
        # Each offer is larger than the limit.
        for number in range(3):
            events.offer("default", [SegmentKey(bytes([number]) * 32)] * 2, [CONTENT, CONTENT], len(CONTENT))
        assert count(events, DROPPED.name) == 6
    lines = [each.getMessage() for each in caplog.records if "not published to routers" in each.getMessage()]
    assert len(lines) == 1
    assert "'default'" in lines[0]


async def test_contents_of_one_tenant_leave_room_for_others() -> None:
    """Many short contents count with what they take beside their bytes."""
    red, blue = Stream("a"), Stream("a")
    config = settings(tenants_text() + red.toml(tenant="red") + blue.toml(tenant="blue"))
    keys = [SegmentKey(number.to_bytes(32, "big")) for number in range(1024)]

    async with published(red, config) as events:
        for _ in range(64):
            events.offer("red", keys, [b"x"] * 1024, 100)
        events.offer("blue", keys, [b"x"] * 1024, 100)
        dropped = {each[1]: each.value for each in events.gauges() if each.metric.name == DROPPED.name}
        assert dropped[("red",)] > 0
        assert dropped[("blue",)] == 0


async def test_long_contents(caplog: pytest.LogCaptureFixture) -> None:
    """A segment of 16 KiB could have 400 KiB of token ids, which the daemon kept for as long as the segment."""
    stream = Stream("a")

    async with published(stream) as events:
        keys = [SegmentKey(bytes([number]) * 32) for number in range(3)]
        for _ in range(2):
            events.offer("default", keys, [b"x" * 100, b"x" * 101, b"x"], 100)
        assert events.contents("default", keys, 1 << 20) == (b"x" * 100, b"", b"x")
        assert count(events, LONG.name) == 2
    lines = [each.getMessage() for each in caplog.records if "the limit is 100" in each.getMessage()]
    assert len(lines) == 1
    assert "shorten the names" in lines[0]


async def test_malformed_requests(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream("a")

    async with published(stream) as events:
        with zmq.Context() as context, context.socket(zmq.DEALER) as noisy:
            noisy.setsockopt(zmq.LINGER, 0)
            noisy.connect(stream.endpoints[1])
            for _ in range(2):
                noisy.send_multipart([b"", b"short"])
            await asyncio.to_thread(wait_until, lambda: count(events, REFUSED.name) == 2, "both were refused")
    lines = [each.getMessage() for each in caplog.records if "request for a replay" in each.getMessage()]
    assert lines == [f"a request for a replay of 'kv@node:a@{MODEL}' was refused: it is not [empty, number of 8 bytes]"]


async def test_the_limits_of_a_socket_and_of_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("a")
    monkeypatch.setattr(listener, "MAX_READERS", 2)
    monkeypatch.setattr(listener, "MAX_READERS_OF_ALL", 3)

    opened: list[asyncio.StreamWriter] = []

    async def open_and_count(events: KvEvents, endpoint: str, readers: int, refused: int) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        # A connection that is refused may be reset before the end of the connect.
        with contextlib.suppress(ConnectionResetError):
            opened.append((await asyncio.open_connection(host, int(port)))[1])
        await asyncio.to_thread(
            wait_until,
            lambda: (count(events, READERS.name), count(events, REFUSED_READERS.name)) == (readers, refused),
            f"{readers} readers, {refused} refused",
        )

    async with published(stream) as events:
        first, second = stream.endpoints
        for endpoint, *counts in ((first, 1, 0), (first, 2, 0), (first, 2, 1), (second, 3, 1), (second, 3, 2)):
            await open_and_count(events, endpoint, *counts)
        for writer in opened:
            writer.close()


@pytest.mark.parametrize(("streams", "kept"), [(1, 100), (2, 100), (8, 25)])
def test_many_streams_share_the_memory_of_two(monkeypatch: pytest.MonkeyPatch, streams: int, kept: int) -> None:
    monkeypatch.setattr(publisher, "MAX_REPLAY_BYTES", 1000)
    monkeypatch.setattr(publisher, "MAX_PENDING_BYTES", 1000 * ENTRY_BYTES)
    stream = publisher._Stream(KvEventStream(tenant="red", model="m", block_tokens=16), 0, streams)
    for number in range(200):
        stream.replay.add(number, bytes(10))
        stream.blocks.offer(SegmentKey(number.to_bytes(32, "big")), b"c")
    assert stream.replay.end - (stream.replay.next(0) or (0,))[0] == kept
    assert stream.blocks.kept_bytes <= 1000 * ENTRY_BYTES * 2 / max(2, streams)


def sequences(kept: Replay, wanted: int) -> list[int] | None:
    position, found = kept.start(wanted), []
    if position is None:
        return None
    while (each := kept.next(position)) is not None:
        found.append(each[0])
        position = each[0] + 1
    return found


def test_messages_from_a_number_on() -> None:
    kept = Replay(100)
    assert sequences(kept, 0) is None
    for sequence in range(10, 14):
        kept.add(sequence, b"12345")
    assert sequences(kept, 11) == [11, 12, 13]
    assert sequences(kept, 14) == []
    assert sequences(kept, 9) is None
    assert sequences(kept, 15) is None
    assert kept.next(13) == (13, b"12345")
    assert kept.next(14) is None
    assert kept.next(3) == (10, b"12345"), "the oldest one that is kept"


def test_beyond_the_limit_the_oldest_messages_go() -> None:
    kept = Replay(20)
    for sequence in range(10):
        kept.add(sequence, bytes(5))
    assert sequences(kept, 6) == [6, 7, 8, 9]
    assert sequences(kept, 5) is None
    kept.add(10, bytes(100))
    assert sequences(kept, 10) == [10]


def test_a_reader_that_knows_nothing_starts_at_the_last_clearing() -> None:
    kept = Replay(40)
    for sequence in range(8):
        kept.add(sequence, bytes(5), clears=sequence in (0, 3))
    assert sequences(kept, 0) == [0, 1, 2, 3, 4, 5, 6, 7]
    for sequence in (8, 9):
        kept.add(sequence, bytes(5))
    assert sequences(kept, 0) == [3, 4, 5, 6, 7, 8, 9]
    assert sequences(kept, 2) == [2, 3, 4, 5, 6, 7, 8, 9]
    for sequence in (10, 11):
        kept.add(sequence, bytes(5))
    assert sequences(kept, 0) is None
