"""The account of a match: each token is counted once, compared with a count token by token."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.scenes import missed, supplied
from tokenlake.core.report.account import ASKED, ENGINE_HAD, READ_BYTES, SAVED, Account, Source
from tokenlake.core.report.misses import Beyond
from tokenlake.identity import TenantId
from tokenlake.metrics import Counters
from tokenlake.wire import Code
from tokenlake.wire.funnel import MissReason

RED = TenantId("red")
SIZE, SLOT_BYTES = 8, 800
SENDS = ("local", "fetched", "disk", "shipped", "unread", "unread elsewhere", "lost", "dead", "hold")
"""What may happen to an item."""
READ = ("local", "fetched", "disk", "shipped")
FATES = {
    "unread": MissReason.SKIPPED,
    "unread elsewhere": MissReason.LIMIT,
    "lost": MissReason.LOST,
    "dead": MissReason.UNREPORTED,
}


def settle(account: Account, index: int, what: str) -> None:
    """Let it happen to an item."""
    if what in ("fetched", "disk"):
        account.arrived(index, Source.DISK if what == "disk" else Source.FETCHED)
    if what == "lost":
        account.lose(index, MissReason.LOST, "wrong bytes")
    if what in ("local", "fetched", "disk", "shipped"):
        account.mark_read(index, b"\1")
    if what == "hold":
        return
    there = what in ("shipped", "unread elsewhere")
    here = what in ("local", "fetched", "disk", "unread", "dead")
    if not account.settle(index, here=here, shipped=there, reported=what != "dead"):
        account.lose(index, MissReason.LIMIT, "SESSION_LIMIT")


@given(
    keys=st.lists(st.sampled_from([*SENDS, Code.MISSING, Code.PENDING]), min_size=1, max_size=8),
    counted=st.integers(0, 8),
    tail=st.integers(1 - SIZE, 2 * SIZE),
    took=st.none() | st.tuples(st.integers(0, 80), st.integers(0, 80)),
    known=st.integers(0, 8),
    independent=st.booleans(),
)
def test_each_token_is_counted_once(
    keys: list[str | Code], counted: int, tail: int, took: tuple[int, int] | None, known: int, independent: bool
) -> None:
    """Items and missing keys in any order, as those of independent keys."""
    counted = min(counted, len(keys))
    tail = tail if counted else 0
    places = [at for at, key in enumerate(keys) if isinstance(key, str) and key in SENDS]
    others = [at for at in range(len(keys)) if at not in places]
    codes = bytes(key for key in keys if isinstance(key, Code))
    beyond = Beyond(codes, others, known)
    account = Account(RED, SIZE, SLOT_BYTES, counted, tail, places, beyond, independent)
    for index, at in enumerate(places):
        settle(account, index, str(keys[at]))
    if took is not None:
        account.took(min(took), max(took), 0.5)
    start, stop = account.start, account.stop
    read = [key for at, key in enumerate(keys) if key in READ and at * SIZE < stop]
    last = str(read[-1]) if read and independent and took is not None else None
    expected: Counter[str] = Counter()
    unread = 0
    """Tokens that local segments supply without a read."""
    for token in range(counted * SIZE + tail):
        at = token // SIZE
        what = keys[at] if at < counted else "tail"
        if token < start:
            expected["had"] += 1
        elif what == "tail":
            expected[MissReason.TOO_SHORT if tail <= SIZE else MissReason.SKIPPED] += 1
        elif last is not None and token < stop:
            expected[str(what) if what in READ else last] += 1
            unread += what != "local" and last == "local" and what not in READ
        elif what in FATES:
            expected[FATES[str(what)]] += 1
        elif what == Code.MISSING:
            expected[MissReason.EVICTED if others.index(at) < known else MissReason.NEVER_STORED] += 1
        elif what == Code.PENDING:
            expected[MissReason.PENDING] += 1
        elif what == "hold":
            expected["held"] += 1
        else:
            expected[str(what) if token < stop else MissReason.SKIPPED] += 1
    sums = account.sums()
    assert sums.held == expected["held"]
    reasons = {reason.value: expected[reason] for reason in MissReason if expected[reason]}
    assert {reason.value: tokens for reason, tokens in account.missed(sums).items()} == reasons
    counters = Counters()
    account.close(counters)
    assert counters[ASKED] == counted * SIZE + tail
    assert counters[ENGINE_HAD] == expected["had"]
    for source in Source:
        assert supplied(counters, source) == expected[source.value]
    assert missed(counters) == reasons
    beyond_counted = sum(keys[at] == "local" for at in places if at >= counted)
    assert counters[READ_BYTES] == (expected["local"] - unread + beyond_counted * SIZE) * SLOT_BYTES // SIZE


@pytest.mark.parametrize(("read", "saved_ms"), [(4, 4000), (2, 2000), (0, 0)])
def test_seconds_of_prefill_saved(read: int, saved_ms: int) -> None:
    """Of a load that ended early, a part of the predicted seconds."""
    account = Account(RED, SIZE, SLOT_BYTES, 5, 0, range(5), Beyond())
    account.took(SIZE, 5 * SIZE, 4.0)
    account.mark_read(1, b"\1" * read)
    for index in range(5):
        account.settle(index, here=True, shipped=False, reported=True)
    counters = Counters()
    account.close(counters)
    assert counters[SAVED] == saved_ms
    assert (counters[ENGINE_HAD], supplied(counters)) == (SIZE, read * SIZE)


def test_seconds_that_are_not_known_have_no_series() -> None:
    account = Account(RED, SIZE, SLOT_BYTES, 1, 0, range(1), Beyond())
    account.mark_read(0, b"\1")
    account.settle(0, here=True, shipped=False, reported=True)
    counters = Counters()
    account.close(counters)
    assert (supplied(counters), counters.by_labels(SAVED)) == (SIZE, {})
