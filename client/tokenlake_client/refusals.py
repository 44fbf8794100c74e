"""The errors that messages carry by the names of their classes."""

from __future__ import annotations

from tokenlake import errors
from tokenlake.errors import ProtocolRefused, Refused, Unreachable


def error_of(kind: str, reason: str, unknown: type[Refused | Unreachable] = ProtocolRefused) -> Refused | Unreachable:
    """The error of the class `kind` with the message `reason`. `unknown`: the class of an error whose own class this
    version does not have."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, Refused | Unreachable):
        return found(reason)
    return unknown(reason)
