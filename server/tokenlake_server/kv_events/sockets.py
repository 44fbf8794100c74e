"""The ZMQ sockets of one stream: events are published on one, missed messages are asked for on the other.

A message is [topic, sequence number (8 bytes, big-endian), payload]. A request on the replay socket is [empty, sequence
number]; the answer is [empty, topic, sequence number, payload] for each message from that number on, and at its end the
number -1 and an empty payload. Both are vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import zmq

from tokenlake.config import Address
from tokenlake_server.kv_events.replay import Replay

__all__ = ["Sockets"]

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
"""Limit of the messages that wait for a reader that does not read; further ones are dropped for this reader."""
MAX_REPLAYS = 8
"""Limit of the replays at a time; further requests are answered as if the messages were not kept."""
REPLAY_MESSAGES = 64
"""Limit of the messages of a replay that wait for a reader that does not read."""
STALL_S = 5.0
"""Seconds after which a replay ends if its reader takes no message."""
PAUSE_S = 0.01
MAX_REQUEST_BYTES = 1024
"""Limit of a frame from a reader; the connection of one that sends a longer frame is closed."""
REQUESTS = 64
"""Limit of the requests of readers that are handled in one round."""
_END = b"\xff" * 8
_NUMBER_BYTES = 8


class Sockets:
    """Used in one thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topic: str, events: Address, replay: Address | None):
        """Raises `zmq.ZMQError` for an address that cannot be opened."""
        self._topic = topic.encode()
        self._replays: dict[bytes, asyncio.Task[None]] = {}
        self.refused = 0
        """Number of requests that were malformed, or beyond `MAX_REPLAYS`."""
        self._events = context.socket(zmq.XPUB)
        self._replay = context.socket(zmq.ROUTER) if replay is not None else None
        try:
            # A reader that subscribes is noticed, also where another one has subscribed to the same topic.
            self._events.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._open(self._events, events, HIGH_WATER_MARK)
            if self._replay is not None and replay is not None:
                # An answer to a reader that does not read waits here, and is not dropped in the middle.
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._open(self._replay, replay, REPLAY_MESSAGES)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open(socket: zmq.Socket[bytes], address: Address, messages: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, messages)
        socket.setsockopt(zmq.RCVHWM, REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if ":" in address.host:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(f"tcp://{address}")

    @property
    def endpoints(self) -> tuple[str, str]:
        """The ZMQ endpoints of the sockets for events and for replays; empty for a socket that the settings do not
        have."""
        both = (self._events, self._replay)
        first, second = ("" if each is None else each.getsockopt_string(zmq.LAST_ENDPOINT) for each in both)
        return first, second

    def publish(self, sequence: int, payload: bytes) -> None:
        """Send a message to all readers. Never waits."""
        self._events.send_multipart((self._topic, sequence.to_bytes(_NUMBER_BYTES, "big"), payload), zmq.NOBLOCK)

    def joined(self) -> bool:
        """True if a reader has subscribed since the last call."""
        found = False
        for _ in range(REQUESTS):
            try:
                found |= self._events.recv(zmq.NOBLOCK)[:1] == b"\1"
            except zmq.Again:
                break
        return found

    def requests(self) -> list[tuple[bytes, int]]:
        """The requests for a replay that have come: (reader, first sequence number)."""
        found: list[tuple[bytes, int]] = []
        for _ in range(REQUESTS if self._replay is not None else 0):
            assert self._replay is not None
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 3 and not frames[1] and len(frames[2]) == _NUMBER_BYTES:
                found.append((frames[0], int.from_bytes(frames[2], "big")))
            else:
                self._refuse("it is not [empty, number of 8 bytes]")
        return found

    def _refuse(self, reason: str) -> None:
        if not self.refused:
            log.warning("a request for a replay of '%s' was refused: %s", self._topic.decode(), reason)
        self.refused += 1

    def answer(self, reader: bytes, start: int, kept: Replay) -> bool:
        """Begin to answer a request. Returns False where the answer is empty, and the reader has to be told all blocks
        anew: the messages that it asks for are not kept, or `MAX_REPLAYS` others are under way."""
        messages = kept.after(start)
        earlier = self._replays.pop(reader, None)
        if earlier is not None:
            earlier.cancel()
        if len(self._replays) >= MAX_REPLAYS:
            self._refuse(f"{MAX_REPLAYS} others are under way")
            with contextlib.suppress(zmq.ZMQError):  # the reader has gone, or reads nothing
                self._replay_message(reader, _END, b"")
            return False
        task = asyncio.get_running_loop().create_task(self._send(reader, messages or []))
        self._replays[reader] = task
        task.add_done_callback(lambda done: self._ended(reader, done))
        return messages is not None

    def _ended(self, reader: bytes, task: asyncio.Task[None]) -> None:
        if self._replays.get(reader) is task:
            del self._replays[reader]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a replay failed", exc_info=error, extra={"kind": "replay"})

    async def _send(self, reader: bytes, messages: list[tuple[int, bytes]]) -> None:
        ending = [(sequence.to_bytes(_NUMBER_BYTES, "big"), payload) for sequence, payload in messages]
        ending.append((_END, b""))
        for sequence, payload in ending:
            until = time.monotonic() + STALL_S
            while True:
                try:
                    self._replay_message(reader, sequence, payload)
                    break
                except zmq.Again:
                    if time.monotonic() > until:
                        return
                    await asyncio.sleep(PAUSE_S)
                except zmq.ZMQError as error:
                    if error.errno == zmq.EHOSTUNREACH:
                        return
                    raise
            await asyncio.sleep(0)

    def _replay_message(self, reader: bytes, sequence: bytes, payload: bytes) -> None:
        """Raises zmq.Again for a reader that takes no message, and zmq.ZMQError for one that has gone."""
        assert self._replay is not None
        self._replay.send_multipart((reader, b"", self._topic, sequence, payload), zmq.NOBLOCK)

    def close(self) -> None:
        """End all replays, and close both sockets."""
        for task in self._replays.values():
            task.cancel()
        for socket in (self._events, self._replay):
            if socket is not None:
                with contextlib.suppress(zmq.ZMQError):
                    socket.close(linger=0)
