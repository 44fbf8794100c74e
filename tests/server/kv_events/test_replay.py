"""The messages that a stream keeps for readers that missed some."""

from __future__ import annotations

from tokenlake_server.kv_events.replay import Replay


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
