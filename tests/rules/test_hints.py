"""Hints: which values have a meaning, and whose word counts."""

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
def test_a_value_without_meaning_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"'{next(iter(field))}'"):
        Hints(**field)


@pytest.mark.parametrize("field", BAD, ids=str)
def test_it_does_not_come_over_the_wire_either(field: dict[str, Any]) -> None:
    items = {name: getattr(NO_HINTS, name) for name in NO_HINTS.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=Hints)


def test_the_newest_word_wins_and_what_it_leaves_out_stays() -> None:
    kept = Hints(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0)
    assert Hints(Outlook.OVER, stop_reason="stop").merged_over(kept) == Hints(Outlook.OVER, "chat", "stop", 1, 60.0)
    assert Hints(Outlook.OVER, "agent", priority=-1).merged_over(kept) == Hints(Outlook.OVER, "agent", "", -1, 0.0)
    assert NO_HINTS.merged_over(kept) == kept
    assert kept.merged_over(NO_HINTS) is kept


def test_how_a_request_ended_leaves_all_that_it_said() -> None:
    said = Hints(Outlook.GOES_ON, "chat", priority=1, ttl_s=60.0, output_tokens=7)
    assert said.ended("length") == msgspec.structs.replace(said, stop_reason="length")
    assert said.ended("stop", 9) == msgspec.structs.replace(said, stop_reason="stop", output_tokens=9)
    with pytest.raises(ValueError, match="'stop_reason'"):
        said.ended("x" * (MAX_LABEL + 1))


def test_a_use_leaves_what_the_engine_said_and_a_late_word_leaves_the_use() -> None:
    said = Hints(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0, output_tokens=7, access=AccessRecord(4, 2))
    later = Hints(access=AccessRecord(6, 4, 1))
    assert later.merged_over(said) == Hints(Outlook.GOES_ON, "chat", "length", 1, 60.0, -1, AccessRecord(6, 4, 1))
    assert Hints(output_tokens=9).merged_over(said) == msgspec.structs.replace(said, output_tokens=9)
    assert Hints(Outlook.OVER).merged_over(said).access == AccessRecord(4, 2)


def test_a_conversation_that_goes_on_counts_its_turns_and_remembers_its_rhythm() -> None:
    first = AccessRecord.after(NO_ACCESS, 0.0, 10, 0, 0)
    assert first == AccessRecord(10, 0)
    second = AccessRecord.after(first, 30.0, 14, 9, 9)
    assert second == AccessRecord(14, 9, 1, 30.0, NEVER, 1)
    third = AccessRecord.after(second, 5.0, 20, 14, 14)
    assert third == AccessRecord(20, 14, 2, 5.0, 30.0, 0)


def test_what_branches_off_inside_a_prompt_or_shares_its_first_segment_only_starts_anew() -> None:
    long = AccessRecord(40, 20, 3, 10.0, 12.0, 0)
    assert AccessRecord.after(long, 2.0, 30, 20, 20) == AccessRecord(30, 20, 0, 2.0, NEVER, 20)
    assert AccessRecord.after(AccessRecord(1, 1), 2.0, 30, 1, 1) == AccessRecord(30, 1, 0, 2.0, NEVER, 0)


def test_a_conversation_goes_on_where_it_is_remembered_however_little_of_it_is_found() -> None:
    previous_owner = AccessRecord(10, 8, 3, 20.0, 25.0, 0)
    again = AccessRecord.after(previous_owner, 30.0, 14, 2, 9)
    assert again == AccessRecord(14, 2, 4, 30.0, 20.0, 1, remembered=7)
    assert again.known == 9
    assert AccessRecord.after(previous_owner, 30.0, 14, 2, 5) == AccessRecord(14, 2, 0, 30.0, NEVER, 5, remembered=3)
    assert AccessRecord.after(NO_ACCESS, 30.0, 14, 2, 9) == AccessRecord(14, 2, remembered=7)


@pytest.mark.parametrize("field", [{"gap_s": float("nan")}, {"unshared": -2}, {"turn": -1}, {"hits": 1 << 32}], ids=str)
def test_a_use_without_meaning_does_not_come_over_the_wire(field: dict[str, Any]) -> None:
    items = {name: getattr(NO_ACCESS, name) for name in NO_ACCESS.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=AccessRecord)
