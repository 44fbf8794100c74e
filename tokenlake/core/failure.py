"""A handler of the rules failed on an event that passed its checks: a mistake of the rules."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.instructions import Instruction

__all__ = ["HandlerFailed"]


class HandlerFailed(RuntimeError):
    """Raised by `NodeCore.handle`; its cause is the exception of the handler.

    What the handler changed before it failed stays, and `instructions` are those that belong to it: the driver carries
    them out as those of any event. Without them memory that is reissued would bear no new generation, and a transfer
    that is noted would never begin, nor end.
    """

    def __init__(self, event: str, instructions: Sequence[Instruction]) -> None:
        """`event`: name of its type."""
        super().__init__(f"the rules failed on an event of type {event}")
        self.instructions = list(instructions)
