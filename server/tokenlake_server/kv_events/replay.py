"""The newest messages of a stream: each reader has a position in them, and readers that missed some ask for them."""

from __future__ import annotations

from collections import deque


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

    @property
    def end(self) -> int:
        """The sequence number behind that of the newest message; 0 before the first one."""
        return self._messages[-1][0] + 1 if self._messages else 0

    def start(self, wanted: int) -> int | None:
        """The number of the first message for a reader that wants those from `wanted` on: this one, or the last
        `AllBlocksCleared`. None if neither is kept."""
        if not self._messages:
            return None
        oldest = self._messages[0][0]
        if oldest <= wanted <= self.end:
            return wanted
        return self._cleared if self._cleared >= oldest else None

    def next(self, position: int) -> tuple[int, bytes] | None:
        """The oldest message that is kept with at least the number `position`, and its number; None where there is
        none yet."""
        if position >= self.end:
            return None
        return self._messages[max(0, position - self._messages[0][0])]
