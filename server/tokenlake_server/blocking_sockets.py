"""Blocking sockets, for threads: whole frames, exact numbers of bytes, the dialling side of a handshake."""

from __future__ import annotations

import secrets
import socket

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.wire import HEADER_BYTES, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.handshake import NONCE_BYTES, Dialler, PeerIdentity

__all__ = ["introduce", "read_frame", "receive_exactly"]


def introduce(sock: socket.socket, identity: PeerIdentity, node: str, purpose: peer.Purpose) -> None:
    """Prove to `node`, at the other end, who this is, and hear its proof. Raises `TokenLakeError` or `OSError`, which
    a time-out of the socket is."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    dialler = Dialler(identity, node, secrets.token_bytes(NONCE_BYTES), purpose)
    sock.sendall(pack_frame(dialler.hello))
    challenge = decode(peer.handshake_decoder, read_frame(sock, identity.max_frame))
    if not isinstance(challenge, peer.PeerChallenge):
        raise ProtocolRefused(f"node {node} refused a {purpose} connection: {challenge}")
    try:
        proof = dialler.answer(challenge)
    except TokenLakeError as error:
        sock.sendall(pack_frame(peer.PeerRefused(type(error).__name__, str(error))))
        raise
    sock.sendall(pack_frame(proof))
    welcome = decode(peer.handshake_decoder, read_frame(sock, identity.max_frame))
    if not isinstance(welcome, peer.PeerWelcome):
        raise ProtocolRefused(f"node {node} refused a {purpose} connection: {welcome}")


def read_frame(sock: socket.socket, max_frame: int) -> bytes:
    """The body of the next frame. Raises `ProtocolRefused` beyond `max_frame`, and as `receive_exactly`."""
    header = bytearray(HEADER_BYTES)
    receive_exactly(sock, memoryview(header))
    size = int.from_bytes(header, "little")
    if size > max_frame:
        raise ProtocolRefused(f"a frame of {size} bytes; at most {max_frame} are accepted")
    body = bytearray(size)
    receive_exactly(sock, memoryview(body))
    return bytes(body)


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises `OSError`; `ConnectionError` when the connection ends before."""
    at = 0
    while at < len(into):
        received = sock.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the connection ended in the middle of a message")
        at += received
