"""Advice: which values have a meaning, and whose word counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenlake.advice import MAX_LABEL, MAX_TTL_S, NEVER, NO_ADVICE, NO_USE, Advice, Outlook, Use

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
        Advice(**field)


@pytest.mark.parametrize("field", BAD, ids=str)
def test_it_does_not_come_over_the_wire_either(field: dict[str, Any]) -> None:
    items = {name: getattr(NO_ADVICE, name) for name in NO_ADVICE.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=Advice)


def test_the_newest_word_wins_and_what_it_leaves_out_stays() -> None:
    kept = Advice(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0)
    assert Advice(Outlook.OVER, stop_reason="stop").over(kept) == Advice(Outlook.OVER, "chat", "stop", 1, 60.0)
    assert Advice(Outlook.OVER, "agent", priority=-1).over(kept) == Advice(Outlook.OVER, "agent", "", -1, 0.0)
    assert NO_ADVICE.over(kept) == kept
    assert kept.over(NO_ADVICE) is kept


def test_how_a_request_ended_leaves_all_that_it_said() -> None:
    said = Advice(Outlook.GOES_ON, "chat", priority=1, ttl_s=60.0, output_tokens=7)
    assert said.ended("length") == msgspec.structs.replace(said, stop_reason="length")
    assert said.ended("stop", 9) == msgspec.structs.replace(said, stop_reason="stop", output_tokens=9)
    with pytest.raises(ValueError, match="'stop_reason'"):
        said.ended("x" * (MAX_LABEL + 1))


def test_a_use_leaves_what_the_engine_said_and_a_late_word_leaves_the_use() -> None:
    said = Advice(Outlook.GOES_ON, "chat", "length", priority=1, ttl_s=60.0, output_tokens=7, use=Use(4, 2))
    later = Advice(use=Use(6, 4, 1))
    assert later.over(said) == Advice(Outlook.GOES_ON, "chat", "length", 1, 60.0, -1, Use(6, 4, 1))
    assert Advice(output_tokens=9).over(said) == msgspec.structs.replace(said, output_tokens=9)
    assert Advice(Outlook.OVER).over(said).use == Use(4, 2)


def test_a_conversation_that_goes_on_counts_its_turns_and_remembers_its_rhythm() -> None:
    first = Use.after(NO_USE, 0.0, 10, 0, 0)
    assert first == Use(10, 0)
    second = Use.after(first, 30.0, 14, 9, 9)
    assert second == Use(14, 9, 1, 30.0, NEVER, 1)
    third = Use.after(second, 5.0, 20, 14, 14)
    assert third == Use(20, 14, 2, 5.0, 30.0, 0)


def test_what_branches_off_inside_a_prompt_or_shares_its_first_segment_only_starts_anew() -> None:
    long = Use(40, 20, 3, 10.0, 12.0, 0)
    assert Use.after(long, 2.0, 30, 20, 20) == Use(30, 20, 0, 2.0, NEVER, 20)
    assert Use.after(Use(1, 1), 2.0, 30, 1, 1) == Use(30, 1, 0, 2.0, NEVER, 0)


def test_a_conversation_goes_on_where_it_is_remembered_however_little_of_it_is_found() -> None:
    former = Use(10, 8, 3, 20.0, 25.0, 0)
    again = Use.after(former, 30.0, 14, 2, 9)
    assert again == Use(14, 2, 4, 30.0, 20.0, 1, remembered=7)
    assert again.known == 9
    assert Use.after(former, 30.0, 14, 2, 5) == Use(14, 2, 0, 30.0, NEVER, 5, remembered=3)
    assert Use.after(NO_USE, 30.0, 14, 2, 9) == Use(14, 2, remembered=7)


@pytest.mark.parametrize("field", [{"gap_s": float("nan")}, {"left": -2}, {"turn": -1}, {"hits": 1 << 32}], ids=str)
def test_a_use_without_meaning_does_not_come_over_the_wire(field: dict[str, Any]) -> None:
    items = {name: getattr(NO_USE, name) for name in NO_USE.__struct_fields__} | field
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(items.values())), type=Use)
