"""What another query engine does not answer for any more is brought here, once."""

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
from tokenlake_query.asking import Asker
from tokenlake_query.segments import Segments, open_here
from tokenlake_query.tally import Tally
from tokenlake_query.views import Share, View
from tokenlake_query.work import Attention

pytestmark = pytest.mark.live

TEXT = Text(80, 6)
VIEW_THERE = 7


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with daemons(1) as cluster, cluster.connect(0, LAYOUT) as pool:
        TEXT.store(pool)
        yield pool


@pytest.fixture
def there() -> Iterator[tuple[Asker, Raw]]:
    ours, theirs = socket.socketpair()
    with theirs:
        asker = Asker(ours, "b", Tally())
        yield asker, Raw(theirs, wire.ask_decoder)
        asker.close()


def view_of(pool: Pool, asker: Asker, keys: list[SegmentKey]) -> tuple[View, Share]:
    """The first two segments here, those of `keys` at the asker."""
    share = Share(asker, VIEW_THERE, tuple(keys))
    here = open_here(pool, pool.prefix(TEXT.tokens).keys[:2])
    return View(pool, Attention(LAYOUT, AttentionShape.of(LAYOUT, HEADS, SCALE)), here, [share]), share


def test_it_is_brought_once_and_the_view_has_it_from_then_on(pool: Pool, there: tuple[Asker, Raw]) -> None:
    asker, raw = there
    view, share = view_of(pool, asker, pool.prefix(TEXT.tokens).keys[2:])
    brought = view.bring(share, time.monotonic() + LIMIT_S)
    assert brought is not None
    assert [slot.tobytes() for slot in brought.slots] == [TEXT.content(index).tobytes() for index in range(2, 6)]
    assert view.bring(share, time.monotonic() + LIMIT_S) is brought
    segments, shares = view.holding
    assert [slot.tobytes() for slot in segments.slots] == [TEXT.content(index).tobytes() for index in range(6)]
    assert not shares
    assert raw.receive() == wire.CloseView((VIEW_THERE,)), "it need not keep them leased"
    assert not view.lost


def test_what_nobody_has_is_lost_for_good(pool: Pool, there: tuple[Asker, Raw]) -> None:
    view, share = view_of(pool, there[0], [SegmentKey(bytes(32))])
    assert view.bring(share, time.monotonic() + LIMIT_S) is None
    assert view.lost
    assert view.holding.shares == (share,)


def test_without_time_it_is_tried_again(pool: Pool, there: tuple[Asker, Raw]) -> None:
    view, share = view_of(pool, there[0], pool.prefix(TEXT.tokens).keys[2:])
    assert view.bring(share, time.monotonic()) is None
    assert not view.lost
    assert view.bring(share, time.monotonic() + LIMIT_S) is not None


def test_segments_stay_right_when_all_else_makes_room(pool: Pool) -> None:
    """Their leases last as long as anybody may compute over them."""
    segments: Segments = open_here(pool, pool.prefix(TEXT.tokens).keys)
    for number in range(60):
        Text(2000 + number, 6).store(pool)
    for index, slot in enumerate(segments.slots):
        assert np.array_equal(slot, TEXT.content(index))
    TEXT.store(pool)
