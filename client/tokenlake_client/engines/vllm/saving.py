"""Which segments of a request are to be stored, and when it is known that they are right.

A segment may be stored once all its tokens are computed from a prefix that is right. A step that waits for loads
may turn out to have computed from blocks that were never filled, for any request that shares them. So while such
steps are out, only tokens are stored that a step before them computed and whose outcome is known::

    0      saved     confirmed          after this step
    |--------|-----------|---------------------|
             | store now | store once the outcome of the steps is known
"""

from __future__ import annotations

from collections import deque

__all__ = ["Progress"]


class Progress:
    """One request's tokens: stored, known to be right, computed."""

    def __init__(self, segment: int) -> None:
        self._segment = segment
        self.saved = 0
        """Segments stored, or handed out to be."""
        self._confirmed = 0
        self._steps: deque[tuple[int, int]] = deque()
        """(step, tokens computed when it ends), of steps whose outcome is not known."""

    def computes(self, step: int, tokens: int) -> None:
        """When `step` ends, `tokens` tokens are computed."""
        self._steps.append((step, tokens))

    def confirm(self, step: int) -> None:
        """All steps up to `step` computed what is right."""
        while self._steps and self._steps[0][0] <= step:
            self._confirmed = self._steps.popleft()[1]

    def void(self) -> None:
        """A load failed: nothing is known of the steps that are out, and what was read may have to be stored anew."""
        self._steps.clear()
        self.saved = 0

    def restart(self) -> None:
        """The request lost its blocks and begins again."""
        self._steps.clear()
        self._confirmed = 0

    def take(self, known: int, *, sure: bool) -> range:
        """Segments to store now, of a request of which `known` tokens are known. `sure`: no step that waits for loads
        is out. They count as stored from now on."""
        computed = self._steps[-1][1] if sure and self._steps else self._confirmed
        end = max(min(computed, known) // self._segment, self.saved)
        segments = range(self.saved, end)
        self.saved = end
        return segments
