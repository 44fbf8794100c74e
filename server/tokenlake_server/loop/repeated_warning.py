"""A warning about a condition that lasts, repeated at growing intervals."""

from __future__ import annotations

REPEAT_S, MOST_REPEAT_S = 10.0, 600.0
"""Seconds until the first repetition; each interval is twice the one before, up to the second figure."""


class RepeatedWarning:
    """Says when to log a condition: `after_s` seconds after it began, then at intervals that double."""

    def __init__(self, after_s: float = 0.0) -> None:
        self._after_s = after_s
        self._kind: object = None
        self._began = 0.0
        self._next = 0.0
        self._interval = REPEAT_S
        self._logged = False

    def should_log(self, kind: object, now: float) -> bool:
        """Returns whether the condition is to be logged at the time `now`, in seconds. Called as often as the condition
        is seen. A condition of another `kind` begins anew; None: there is no condition."""
        if kind != self._kind:
            self._kind, self._began, self._interval, self._logged = kind, now, REPEAT_S, False
            self._next = now + self._after_s
        if kind is None or now < self._next:
            return False
        self._next, self._interval = now + self._interval, min(2 * self._interval, MOST_REPEAT_S)
        self._logged = True
        return True

    def lasted(self, now: float) -> float:
        """Seconds since the condition began."""
        return now - self._began

    @property
    def logged(self) -> bool:
        """True if the present condition was logged, so that its end is worth a line too."""
        return self._logged and self._kind is not None
