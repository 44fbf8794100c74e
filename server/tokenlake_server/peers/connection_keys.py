"""The keys of bulk and query connections, which nodes with certificates hand over on their control connection.

::

    dialler                                          acceptor
       | ConnectionKey: id, keys ------ control ------->| kept until used, at most KEPT_S
       | OpenConnection: id ------ new connection ----->| the keys are found, and used up
       |<------ PeerWelcome, or PeerRefused             |
       |<====== records in both directions ============>|

`OpenConnection` may arrive before `ConnectionKey` and then waits for it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import NamedTuple

from tokenlake.wire import PROTOCOL_VERSION, peer
from tokenlake.wire.fields import NONCE_BYTES, RECORD_KEY_BYTES, RecordKeys

KEPT_S = 5.0
"""Seconds within which a connection must be opened after its keys arrived."""
MAX_PER_NODE = 64
"""Limit of the unused keys of one node, which opens fewer connections at a time. Beyond it the oldest are dropped."""


class Granted(NamedTuple):
    """The facts of a connection that a node with proven identity has announced."""

    hello: peer.PeerHello
    """As the dialler would have sent it on a plain connection."""
    keys: RecordKeys
    until: float


def new_keys(purpose: peer.DataPurpose) -> tuple[peer.ConnectionKey, RecordKeys]:
    """Random keys for a connection that this node opens: the message for the other node, and the keys of this side."""
    sending, receiving = secrets.token_bytes(RECORD_KEY_BYTES), secrets.token_bytes(RECORD_KEY_BYTES)
    message = peer.ConnectionKey(secrets.token_bytes(NONCE_BYTES), purpose, sending, receiving)
    return message, RecordKeys(sending, receiving)


class KeptKeys:
    """The keys that other nodes sent and have not used yet."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._kept: dict[str, OrderedDict[bytes, Granted]] = {}
        """By node, and by the id of the connection, oldest first."""

    def add(self, node: str, incarnation: int, message: peer.ConnectionKey, now: float) -> None:
        """Keep the keys of a connection that `node` is about to open."""
        kept = self._kept.setdefault(node, OrderedDict())
        version, cluster = PROTOCOL_VERSION, self._cluster
        hello = peer.PeerHello(version, version, cluster, node, incarnation, message.purpose, message.connection)
        keys = RecordKeys(sending=message.to_dialler, receiving=message.to_acceptor)
        kept[message.connection] = Granted(hello, keys, now + KEPT_S)
        while len(kept) > MAX_PER_NODE or next(iter(kept.values())).until < now:
            kept.popitem(last=False)

    def take(self, connection: bytes, now: float) -> Granted | None:
        """Remove and return the keys of a connection; None if there are none, or they were used or are too old."""
        for kept in self._kept.values():
            granted = kept.pop(connection, None)
            if granted is not None:
                return granted if granted.until >= now else None
        return None

    def forget(self, node: str) -> None:
        """Drop the unused keys of a node whose control connection ended."""
        self._kept.pop(node, None)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
