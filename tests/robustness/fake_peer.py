"""A peer that answers to have segments and sends wrong bytes slowly, until the other side ends the transfer."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from tokenlake.layout import Layout
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.peers.handshake import acceptor_proof

POISON = b"\xee" * 256


class FakePeer:
    """Listens on `port`; a context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cut = 0
        """Transfers that the other side ended."""
        self._layout: Layout | None = None
        self._keys: set[bytes] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []

    def __enter__(self) -> FakePeer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def serves(self, keys: Sequence[bytes], layout: Layout) -> None:
        """Answer from now on that these segments are here."""
        self._layout = layout
        self._keys = {bytes(key) for key in keys}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            hello = decode(peer.handshake_decoder, _frame(sock))
            assert isinstance(hello, peer.PeerHello)
            unproven = peer.PeerChallenge(
                hello.newest_version, hello.cluster, self.name, 1, secrets.token_bytes(32), bytes(32)
            )
            proof = acceptor_proof(b"", hello, unproven)
            sock.sendall(pack_frame(msgspec.structs.replace(unproven, proof=proof)))
            assert isinstance(decode(peer.handshake_decoder, _frame(sock)), peer.PeerProof)
            sock.sendall(pack_frame(peer.PeerWelcome()))
            while True:
                body = _frame(sock)
                if hello.purpose == "bulk":
                    self._trickle(sock, decode(peer.bulk_request_decoder, body))
                else:
                    self._answer(sock, decode(peer.peer_decoder, body))

    def _answer(self, sock: socket.socket, message: peer.PeerMessage) -> None:
        match message:
            case peer.Ping():
                sock.sendall(pack_frame(peer.Pong(message.call, (0.0, 0.0, 0.0), 0.0)))
                # The real node is the directory node of some of the keys.
                sock.sendall(pack_frame(peer.Owned("default", b"".join(sorted(self._keys)))))
            case peer.Lookup():
                keys = [message.keys[at : at + 32] for at in range(0, len(message.keys), 32)]
                codes = bytes(Code.LOCAL if key in self._keys else Code.MISSING for key in keys)
                lease = int(Code.LOCAL in codes)
                sock.sendall(pack_frame(peer.LookupReply(message.call, lease, codes, (), (0.0, 0.0, 0.0), 0.0)))
            case peer.Offer():
                codes = bytes([Code.NO_SLOT]) * (len(message.keys) // 32)
                sock.sendall(pack_frame(peer.OfferReply(message.call, codes, (0.0, 0.0, 0.0), 0.0)))
            case _:
                pass

    def _trickle(self, sock: socket.socket, message: peer.Pull) -> None:
        assert self._layout is not None
        count = len(message.keys) // 32
        if not count:
            sock.sendall(pack_frame(peer.Pulled(peer.PROBE_BYTES, b"", b"")) + bytes(peer.PROBE_BYTES))
            return
        checksums = bytes(8 * self._layout.shards * count)
        codes = bytes([Code.LOCAL]) * count
        sock.sendall(pack_frame(peer.Pulled(self._layout.segment_bytes, codes, checksums)))
        try:
            while True:
                sock.sendall(POISON)
                # This is so slow that a segment takes longer than the fetch waits.
                time.sleep(0.02)
        except OSError:
            self.cut += 1
            raise


def _frame(sock: socket.socket) -> bytes:
    return _exactly(sock, int.from_bytes(_exactly(sock, 4), "little"))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
