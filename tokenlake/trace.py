"""The context of a trace: the span of a caller below which the spans of a request belong (W3C Trace Context, level 1).

In messages it takes `CONTEXT_BYTES`: the id of the trace (16), that of the span (8), and the flags (1). Only contexts
that are sampled travel, so that requests without spans cost nothing.
"""

from __future__ import annotations

import re

CONTEXT_BYTES = 25
NO_TRACE = b""
"""Stands for no context."""
MAX_TRACEPARENT = 512
"""Limit of the characters of a `traceparent` of a later version of the standard."""
SAMPLED = 1
"""The flag of a context whose trace is recorded."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL)


def parse_traceparent(text: object) -> bytes:
    """The context in a header `traceparent`; `NO_TRACE` for one that is not sampled, and for any other value. A client
    of an engine may send any value: none raises, and none is logged."""
    if not isinstance(text, str) or not text or len(text) > MAX_TRACEPARENT:
        return NO_TRACE
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return NO_TRACE
    version, trace, span, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return NO_TRACE
    return checked(bytes.fromhex(trace + span + flags))


def checked(context: bytes) -> bytes:
    """The context of a message, or `NO_TRACE` where it is not sampled or has no ids."""
    if len(context) != CONTEXT_BYTES or not context[24] & SAMPLED or not any(context[:16]) or not any(context[16:24]):
        return NO_TRACE
    return context


def traceparent_of(context: bytes) -> str:
    """The header `traceparent` of a context; empty for `NO_TRACE`."""
    return f"00-{context[:16].hex()}-{context[16:24].hex()}-{context[24]:02x}" if context else ""
