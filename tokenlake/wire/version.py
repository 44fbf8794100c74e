"""Agreement of two sides on a protocol version.

A cluster is upgraded one node at a time, so nodes of two versions talk to each other. Without a new protocol version a
message may get a field at its end, with a default: decoders leave out fields that they do not know. A message of a new
type may be sent between daemons if it asks for no reply: a node that does not know the type drops it and keeps the
connection. Every other change of the wire, a new code included, raises `PROTOCOL_VERSION`. A node may use the change
only where both sides agreed on that version.
"""

from __future__ import annotations

from tokenlake.errors import ProtocolRefused

PROTOCOL_VERSION = 2
"""2: `engine.Welcome.kept` and `engine.Regrant`, by which engines keep their memory over a restart of the daemon."""
OLDEST_VERSION = 1
"""Both ends offer [OLDEST_VERSION, PROTOCOL_VERSION] and use the highest that both know."""


def agree(oldest: int, newest: int) -> int:
    """The version to use with a peer that offers this range. Raises `ProtocolRefused` naming both ranges."""
    version = min(newest, PROTOCOL_VERSION)
    if version < max(oldest, OLDEST_VERSION):
        raise ProtocolRefused(
            f"the other side speaks protocol versions {oldest} to {newest}, this side {OLDEST_VERSION} to "
            f"{PROTOCOL_VERSION}; install matching versions of tokenlake on both"
        )
    return version
