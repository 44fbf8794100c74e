"""Codes: one byte each, refusals from 32 on."""

from __future__ import annotations

from tokenlake.wire import Code


def test_codes_fit_a_byte_and_refusals_start_at_32() -> None:
    assert all(0 < code < 256 for code in Code)
    answers = {code.name for code in Code if not code.refused}
    assert answers == {"LOCAL", "REMOTE", "PENDING", "MISSING", "UNKNOWN", "LOST", "ELSEWHERE", "DEFERRED"} | {
        "RESERVED", "EXISTS", "COMMITTED", "EXPIRED",
    }  # fmt: skip
