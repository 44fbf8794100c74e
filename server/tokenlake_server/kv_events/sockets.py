"""The sockets of one stream: events are published on one, missed messages are asked for on the other.

A message is [topic, sequence number (8 bytes, big-endian), payload]. A request on the replay socket is [empty, sequence
number]; the answer is [empty, topic, sequence number, payload] for each message from that number on, and at its end the
number -1 and an empty payload. Both are vLLM's.
"""

from __future__ import annotations

from tokenlake.config import Address
from tokenlake_server.kv_events.listener import Listener, Room
from tokenlake_server.kv_events.reader import EventReader, Published, ReplayReader
from tokenlake_server.kv_events.replay import Replay


class Sockets:
    """Used in one thread only, on its event loop."""

    def __init__(
        self,
        topic: str,
        events: Address | str,
        replay: Address | str | None,
        users: frozenset[int],
        kept: Replay,
        room: Room,
    ) -> None:
        """`users`: those that may read, where readers are in this machine. Raises `ConfigurationError` for an address
        that cannot be opened."""
        published = Published(topic, kept)
        self.shared = published
        self._events = Listener(events, users, topic, room, lambda *each: EventReader(published, *each))
        self._replay: Listener | None = None
        if replay is not None:
            try:
                self._replay = Listener(replay, users, topic, room, lambda *each: ReplayReader(published, *each))
            except BaseException:
                self._events.close()
                raise

    @property
    def endpoints(self) -> tuple[str, str]:
        """The ZMQ endpoints of the sockets for events and for replays; empty for a socket that the settings do not
        have."""
        return self._events.endpoint, "" if self._replay is None else self._replay.endpoint

    @property
    def readers(self) -> int:
        """The number of connections."""
        return sum(len(each.readers) for each in self._listeners())

    @property
    def refused_readers(self) -> int:
        """The number of connections that were closed: of users that may not read, beyond the limits, of no use."""
        return sum(each.refused for each in self._listeners())

    def published(self) -> None:
        """A message has been added to the kept ones: send it to the readers. Never waits."""
        for reader in list(self._events.readers):
            reader.pump()

    def close(self) -> None:
        """Close both sockets and all connections."""
        for each in self._listeners():
            each.close()

    def _listeners(self) -> tuple[Listener, ...]:
        return (self._events,) if self._replay is None else (self._events, self._replay)
