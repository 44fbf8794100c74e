"""Hints: valid values, and the merge of newer hints over older ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenlake.hints import MAX_LABEL, MAX_TTL_S, NEVER, NO_ACCESS, NO_HINTS, AccessRecord, Hints, Outlook

BAD: list[dict[str, Any]] = [
    {"outlook": 3},
    {"outlook": -1},
    {"category": "x" * (MAX_LABEL + 1)},
    {"stop_reason": "x" * (MAX_LABEL + 1)},
    {"category": "two\nlines"},
    {"stop_reason": "\x1b[2J"},
    {"priority": 2},
    {"priority": -2},
    {"ttl_s": float("nan")},
    {"ttl_s": float("inf")},
    {"ttl_s": -1.0},
    {"ttl_s": MAX_TTL_S + 1},
    {"output_tokens": -2},
]


@pytest.mark.parametrize("field", BAD, ids=str)
def test_an_invalid_value_is_refused(field: dict[str, Any]) -> None:
    """By name, and on the wire."""
    with pytest.raises(ValueError, match=f"'{next(iter(field))}'"):
        Hints(**field)
    items = {name: getattr(NO_HINTS, name) for name in NO_HINTS.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=Hints)


def test_newer_hints_replace_only_what_they_say() -> None:
    kept = Hints(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0)
    assert Hints(Outlook.OVER, stop_reason="stop").merged_over(kept) == Hints(Outlook.OVER, "chat", "stop", 1, 60.0)
    assert Hints(Outlook.OVER, "agent", priority=-1).merged_over(kept) == Hints(Outlook.OVER, "agent", "", -1, 0.0)
    assert NO_HINTS.merged_over(kept) == kept
    assert kept.merged_over(NO_HINTS) is kept


def test_the_end_of_a_request_keeps_its_hints() -> None:
    given = Hints(Outlook.GOES_ON, "chat", priority=1, ttl_s=60.0, output_tokens=7)
    assert given.ended("length") == msgspec.structs.replace(given, stop_reason="length")
    assert given.ended("stop", 9) == msgspec.structs.replace(given, stop_reason="stop", output_tokens=9)
    with pytest.raises(ValueError, match="'stop_reason'"):
        given.ended("x" * (MAX_LABEL + 1))


def test_access_records_and_engine_hints_are_independent() -> None:
    given = Hints(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0, output_tokens=7, access=AccessRecord(4, 2))
    later = Hints(access=AccessRecord(6, 4, 1))
    assert later.merged_over(given) == Hints(Outlook.GOES_ON, "chat", "length", 1, 60.0, -1, AccessRecord(6, 4, 1))
    assert Hints(output_tokens=9).merged_over(given) == msgspec.structs.replace(given, output_tokens=9)
    assert Hints(Outlook.OVER).merged_over(given).access == AccessRecord(4, 2)


def test_a_conversation_counts_turns_and_gaps() -> None:
    first = AccessRecord.after(NO_ACCESS, 0.0, 10, 0, 0)
    assert first == AccessRecord(10, 0)
    second = AccessRecord.after(first, 30.0, 14, 9, 9)
    assert second == AccessRecord(14, 9, 1, 30.0, NEVER, 1)
    third = AccessRecord.after(second, 5.0, 20, 14, 14)
    assert third == AccessRecord(20, 14, 2, 5.0, 30.0, 0)


def test_a_branch_starts_a_new_conversation() -> None:
    long = AccessRecord(40, 20, 3, 10.0, 12.0, 0)
    assert AccessRecord.after(long, 2.0, 30, 20, 20) == AccessRecord(30, 20, 0, 2.0, NEVER, 20)
    assert AccessRecord.after(AccessRecord(1, 1), 2.0, 30, 1, 1) == AccessRecord(30, 1, 0, 2.0, NEVER, 0)


def test_a_conversation_goes_on_at_a_remembered_end() -> None:
    previous_owner = AccessRecord(10, 8, 3, 20.0, 25.0, 0)
    again = AccessRecord.after(previous_owner, 30.0, 14, 2, 9)
    assert again == AccessRecord(14, 2, 4, 30.0, 20.0, 1, remembered=7)
    assert again.known == 9
    assert AccessRecord.after(previous_owner, 30.0, 14, 2, 5) == AccessRecord(14, 2, 0, 30.0, NEVER, 5, remembered=3)
    assert AccessRecord.after(NO_ACCESS, 30.0, 14, 2, 9) == AccessRecord(14, 2, remembered=7)


@pytest.mark.parametrize("field", [{"gap_s": float("nan")}, {"unshared": -2}, {"turn": -1}, {"hits": 1 << 32}], ids=str)
def test_an_invalid_access_record_is_refused_on_the_wire(field: dict[str, Any]) -> None:
    items = {name: getattr(NO_ACCESS, name) for name in NO_ACCESS.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=AccessRecord)
