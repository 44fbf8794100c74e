"""The status and the text with which a call ends."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("grpc")

from tokenlake.errors import Unreachable
from tokenlake_server.control.service import abort_with


class Call:
    """Stands for the context of a call, and keeps its end."""

    def __init__(self) -> None:
        self.ended: tuple[str, str] = "", ""

    async def abort(self, code: Any, text: str) -> None:
        self.ended = code.name, text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), ("DEADLINE_EXCEEDED", "the daemon did not answer in time")),
        (Unreachable(""), ("UNAVAILABLE", "Unreachable")),
        (ValueError(""), ("INVALID_ARGUMENT", "ValueError")),
        (ValueError("a reason"), ("INVALID_ARGUMENT", "a reason")),
        (KeyError("secret"), ("INTERNAL", "the daemon failed on this call; its log has the error")),
    ],
)
async def test_the_end_of_a_call(error: Exception, expected: tuple[str, str]) -> None:
    call: Any = Call()
    await abort_with(call, error, "Explain")
    assert call.ended == expected
