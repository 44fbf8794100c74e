"""Sockets that send any frames or bytes: clients and peers that violate the protocol."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.robustness.live import LAYOUT
from tokenlake.config import load_config
from tokenlake.keys import probe
from tokenlake.wire import HEADER_BYTES, PROTOCOL_VERSION, engine, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.peers.handshake import NONCE_BYTES, Dialler, PeerIdentity
from tokenlake_testing.cluster import Node

LIMIT_S = 20.0


class Raw:
    """A socket and frames; a context manager."""

    def __init__(self, address: Path | tuple[str, int], source: str = "") -> None:
        """`source`: the address from which to connect; empty: any."""
        family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        if source:
            self.sock.bind((source, 0))
        # The socket is blocking: with a timeout, a full backlog would be an error at once.
        self.sock.connect(str(address) if isinstance(address, Path) else address)
        self.sock.settimeout(LIMIT_S)

    @classmethod
    def of(cls, sock: socket.socket) -> Raw:
        """A connection that was accepted."""
        raw = cls.__new__(cls)
        raw.sock = sock
        sock.settimeout(LIMIT_S)
        return raw

    @classmethod
    def joined(cls, path: Path, **changes: Any) -> Raw:
        """A connection whose Hello, with these changed fields, was accepted."""
        raw = cls(path)
        raw.send(hello(**changes))
        assert isinstance(raw.reply(), engine.Welcome)
        return raw

    def failed(self) -> engine.Failed:
        """The daemon's next reply, which is a refusal."""
        reply = self.reply()
        assert isinstance(reply, engine.Failed), reply
        return reply

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(pack_frame(message))

    def write(self, data: bytes) -> None:
        """Send bytes, also where the other side may have closed the connection already."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def body(self) -> bytes:
        """The next frame's body; b'' at the end of the stream."""
        header = self._exactly(HEADER_BYTES)
        return self._exactly(struct.unpack("<I", header)[0]) if header else b""

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = self.sock.recv(count - len(data))
            except ConnectionResetError:
                return b""
            if not part:
                return b""
            data += part
        return data

    def reply(self) -> engine.EngineReply:
        """The daemon's next reply to an engine."""
        return decode(engine.reply_decoder, self.body())

    def answer(self) -> peer.Handshake:
        """The daemon's next frame of a handshake between peers."""
        return decode(peer.handshake_decoder, self.body())

    def closed(self) -> bool:
        """True when the other side closed without another frame."""
        return self.body() == b""


def hello(**changes: Any) -> engine.Hello:
    """A valid Hello with changed fields."""
    fields: dict[str, Any] = {
        "id": 1,
        "oldest_version": PROTOCOL_VERSION,
        "newest_version": PROTOCOL_VERSION,
        "layout": LAYOUT.encode(),
        "probe": probe(engine.PROBE_SECRET, LAYOUT.fingerprint()),
    }
    return engine.Hello(**(fields | changes))


def refusal(path: Path, message: msgspec.Struct) -> engine.Failed:
    """The daemon's reply to a first frame, with which it refuses and closes the connection."""
    with Raw(path) as raw:
        raw.send(message)
        failed = raw.failed()
        assert raw.closed()
        return failed


def peer_address(node: Node) -> tuple[str, int]:
    """The address at which a daemon listens for peers."""
    return "127.0.0.1", int(node.settings["listen"].rpartition(":")[2])


def identity_of(node: Node) -> PeerIdentity:
    """The identity of a daemon with the settings of `node` that starts now, with its secret."""
    incarnation = time.time_ns()
    flags = {name.replace("-", "_"): value for name, value in node.settings.items()}
    file = flags.pop("config", None)
    text = Path(file).read_text() if file else None
    config = load_config(toml_text=text, environ={}, flags=flags, uid=os.geteuid()).config
    return PeerIdentity(config.node, incarnation, config.cluster_secret, config.cluster)


def introduce(raw: Raw, identity: PeerIdentity, node: str, purpose: peer.Purpose) -> peer.Handshake:
    """Do the handshake with `node` as `identity`. Returns the reply to the proof."""
    dialler = Dialler(identity, node, secrets.token_bytes(NONCE_BYTES), purpose=purpose)
    raw.send(dialler.hello)
    challenge = raw.answer()
    assert isinstance(challenge, peer.PeerChallenge), challenge
    raw.send(dialler.answer(challenge))
    return raw.answer()
