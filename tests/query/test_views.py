"""The part of a view at a peer that stops answering is fetched, once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.query.raw import Raw
from tests.query.scene import HEADS, LAYOUT, SCALE, Text
from tests.robustness.live import LIMIT_S, daemons
from tokenlake.attention import AttentionShape
from tokenlake.identity import SegmentKey
from tokenlake.wire import query as wire
from tokenlake_client import Pool
from tokenlake_query.compute_thread import Attention
from tokenlake_query.counters import Counters
from tokenlake_query.peer_client import PeerClient
from tokenlake_query.segments import Segments, open_local
from tokenlake_query.views import Share, View

pytestmark = pytest.mark.live

TEXT = Text(80, 6)
VIEW_THERE = 7


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with daemons(1) as cluster, cluster.connect(0, LAYOUT) as pool:
        TEXT.store(pool)
        yield pool


@pytest.fixture
def there() -> Iterator[tuple[PeerClient, Raw]]:
    ours, theirs = socket.socketpair()
    with theirs:
        client = PeerClient(ours, "b", Counters())
        yield client, Raw(theirs, wire.ask_decoder)
        client.close()


def view_of(pool: Pool, client: PeerClient, keys: list[SegmentKey]) -> tuple[View, Share]:
    """A view whose first two segments are local and whose segments `keys` are a share of the peer."""
    share = Share(client, VIEW_THERE, tuple(keys))
    here = open_local(pool, pool.prefix(TEXT.tokens).keys[:2])
    return View(pool, Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE)), here, [share]), share


def test_a_share_is_fetched_once_and_becomes_local(pool: Pool, there: tuple[PeerClient, Raw]) -> None:
    client, raw = there
    view, share = view_of(pool, client, pool.prefix(TEXT.tokens).keys[2:])
    brought = view.fetch(share, time.monotonic() + LIMIT_S)
    assert brought is not None
    assert [slot.tobytes() for slot in brought.slots] == [TEXT.content(index).tobytes() for index in range(2, 6)]
    assert view.fetch(share, time.monotonic() + LIMIT_S) is brought
    segments, shares = view.placement
    assert [slot.tobytes() for slot in segments.slots] == [TEXT.content(index).tobytes() for index in range(6)]
    assert not shares
    assert raw.receive() == wire.CloseView((VIEW_THERE,)), "the peer's lease is released"
    assert not view.lost


def test_segments_without_an_owner_are_lost(pool: Pool, there: tuple[PeerClient, Raw]) -> None:
    view, share = view_of(pool, there[0], [SegmentKey(bytes(32))])
    assert view.fetch(share, time.monotonic() + LIMIT_S) is None
    assert view.lost
    assert view.placement.shares == (share,)


def test_a_fetch_without_time_is_tried_again(pool: Pool, there: tuple[PeerClient, Raw]) -> None:
    view, share = view_of(pool, there[0], pool.prefix(TEXT.tokens).keys[2:])
    assert view.fetch(share, time.monotonic()) is None
    assert not view.lost
    assert view.fetch(share, time.monotonic() + LIMIT_S) is not None


def test_leased_segments_survive_eviction(pool: Pool) -> None:
    """The segments stay leased as long as arrays over them exist."""
    segments: Segments = open_local(pool, pool.prefix(TEXT.tokens).keys)
    for number in range(60):
        Text(2000 + number, 6).store(pool)
    for index, slot in enumerate(segments.slots):
        assert np.array_equal(slot, TEXT.content(index))
    TEXT.store(pool)
