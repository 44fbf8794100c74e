"""The newest messages of a stream, for readers that missed some."""

from __future__ import annotations

from collections import deque

__all__ = ["Replay"]


class Replay:
    """A bounded list of messages with consecutive sequence numbers."""

    def __init__(self, limit: int) -> None:
        """`limit`: most bytes of the messages."""
        self._limit = limit
        self._messages: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._cleared = -1

    def add(self, sequence: int, payload: bytes, *, clears: bool = False) -> None:
        """Append a message. `clears`: it begins with `AllBlocksCleared`, so that it and the messages behind it say all
        that a reader needs to know."""
        self._messages.append((sequence, payload))
        self._bytes += len(payload)
        if clears:
            self._cleared = sequence
        while self._bytes > self._limit and len(self._messages) > 1:
            self._bytes -= len(self._messages.popleft()[1])

    def after(self, start: int) -> list[tuple[int, bytes]] | None:
        """The messages for a reader that wants those from `start` on: these, or all from the last `AllBlocksCleared`
        on. None if neither is kept."""
        if not self._messages:
            return None
        oldest, newest = self._messages[0][0], self._messages[-1][0]
        if not oldest <= start <= newest + 1:
            start = self._cleared
            if start < oldest:
                return None
        return [(sequence, payload) for sequence, payload in self._messages if sequence >= start]
