"""Blocking sockets, for threads: the dialling side of a handshake, whole frames, exact numbers of bytes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Literal

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import FrameDecoder, pack_frame, peer
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake_server.peers.handshake import NONCE_BYTES, Dialler, PeerIdentity

LOOPBACK_BUFFER, ENCRYPTED_LOOPBACK_BUFFER = 256 << 10, 1 << 20
"""Bytes of the buffer of a plain socket between two processes of one machine: few, so that the receiver reads the bytes
while they are still in the processor's cache. The buffer of an encrypted one takes the next bytes while the receiver
decrypts."""


NewKeys = Callable[[str, peer.DataPurpose], tuple[bytes, RecordKeys] | None]
"""Function that makes keys for a connection to a node (`PeerConnections.new_keys`); None: connections are plain."""


def no_keys(node: str, purpose: peer.DataPurpose) -> None:
    """The function `NewKeys` of a node without certificates: its connections are plain."""


def introduce(
    sock: socket.socket, identity: PeerIdentity, node: str, purpose: peer.DataPurpose, new_keys: NewKeys
) -> RecordKeys | None:
    """Do the handshake with `node` on a connection that this node opened. Returns the keys of its records; None: the
    connection is plain. Raises `TokenLakeError` when either side refuses, `OSError` when the connection ends or the
    socket's timeout passes."""
    offer = new_keys(node, purpose)
    if offer is None:
        _prove(sock, identity, node, purpose)
        return None
    connection, keys = offer
    sock.sendall(pack_frame(peer.OpenConnection(connection)))
    _welcomed(sock, node, purpose)
    return keys


def _prove(sock: socket.socket, identity: PeerIdentity, node: str, purpose: peer.Purpose) -> None:
    dialler = Dialler(identity, node, secrets.token_bytes(NONCE_BYTES), purpose)
    sock.sendall(pack_frame(dialler.hello))
    body = read_frame(sock, peer.HANDSHAKE_BYTES)
    challenge = decode(peer.handshake_decoder, body)
    if not isinstance(challenge, peer.PeerChallenge):
        raise ProtocolRefused(f"node {node} refused a {purpose} connection: {challenge}")
    try:
        proof = dialler.answer(challenge, body)
    except TokenLakeError as error:
        sock.sendall(pack_frame(peer.PeerRefused(type(error).__name__, str(error))))
        raise
    sock.sendall(pack_frame(proof))
    _welcomed(sock, node, purpose)


def _welcomed(sock: socket.socket, node: str, purpose: peer.Purpose) -> None:
    welcome = decode(peer.handshake_decoder, read_frame(sock, peer.HANDSHAKE_BYTES))
    if not isinstance(welcome, peer.PeerWelcome):
        raise ProtocolRefused(f"node {node} refused a {purpose} connection: {welcome}")


def read_frame(sock: socket.socket, max_frame: int) -> bytes:
    """Read the next frame from the socket and return its body; bytes behind it stay in the socket. Raises
    `ProtocolRefused` for a frame of more than `max_frame` bytes, `OSError`: `ConnectionError` when the connection ends
    first."""
    decoder = FrameDecoder(max_frame)
    while (body := decoder.next_frame()) is None:
        received = sock.recv(decoder.missing, socket.MSG_WAITALL)
        if not received:
            raise ended()
        decoder.add(received)
    return body


def limit_wait(sock: socket.socket, option: Literal["SO_RCVTIMEO", "SO_SNDTIMEO"], seconds: float) -> None:
    """Limit the time that each `recv` or `send` on a blocking socket waits to `seconds`, at least 1 ms. The kernel
    keeps this timeout; with Python's `settimeout` each call would be a poll and a partial receipt or send."""
    # 0 would mean no limit.
    whole, micro = divmod(round(max(0.001, seconds) * 1e6), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), struct.pack("ll", whole, micro))


def size_buffer(sock: socket.socket, option: int, *, encrypted: bool) -> None:
    """Limit the buffer `option` (SO_SNDBUF or SO_RCVBUF) of a bulk connection within this machine."""
    if ipaddress.ip_address(sock.getpeername()[0]).is_loopback:
        nbytes = ENCRYPTED_LOOPBACK_BUFFER if encrypted else LOOPBACK_BUFFER
        sock.setsockopt(socket.SOL_SOCKET, option, nbytes)


def ended() -> ConnectionError:
    """The error of a connection that the other side closed while more bytes were due."""
    return ConnectionError("the connection ended in the middle of a message")
