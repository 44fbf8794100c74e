"""Advice: which values have a meaning, and whose word counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenlake.advice import MAX_LABEL, MAX_TTL_S, NO_ADVICE, Advice, Outlook

BAD: list[dict[str, Any]] = [
    {"outlook": 3},
    {"outlook": -1},
    {"category": "x" * (MAX_LABEL + 1)},
    {"stop_reason": "x" * (MAX_LABEL + 1)},
    {"priority": 2},
    {"priority": -2},
    {"ttl_s": float("nan")},
    {"ttl_s": float("inf")},
    {"ttl_s": -1.0},
    {"ttl_s": MAX_TTL_S + 1},
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
    assert NO_ADVICE.over(kept) == Advice(Outlook.UNKNOWN, "chat", "", 1, 60.0)
    assert kept.over(NO_ADVICE) is kept
