"""One side of a TLS connection in memory: bytes in, bytes out, no I/O.

A handshake takes 1.2 to 1.7 ms of processor time, so its steps (`handshake`) run in a thread; `FrameConnection` sees to
that, and calls nothing else meanwhile.
"""

from __future__ import annotations

import ssl

from tokenlake.errors import CredentialRefused, ProtocolRefused
from tokenlake_server.peers.certificates import Contexts, PeerCertificate, peer_certificate

HANDSHAKE_RECORD, ALERT_RECORD = 0x16, 0x15
RECORD_BYTES = 16 << 10
NO_TLS = "the other side answered without TLS: it has no 'certificate'"


def is_tls(first: bytes) -> bool:
    """True if the first bytes of a connection begin a TLS handshake. A frame never begins like that: it would be longer
    than a frame of a handshake may be."""
    return first[:1] == bytes([HANDSHAKE_RECORD]) and first[1:2] in (b"", b"\x03") and first[2:3] != b"\x00"


class TlsSession:
    """One side of a connection with mutual TLS 1.3."""

    def __init__(self, contexts: Contexts, *, server: bool) -> None:
        self._contexts = contexts
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = server
        """False: this side begins the handshake."""
        self._tls: ssl.SSLObject | None = None
        self._first = True
        self.peer: PeerCertificate | None = None
        """The other side's certificate, once the handshake is complete. Its validity and name are not checked yet."""

    def handshake(self) -> None:
        """Do the next step of the handshake with the bytes received so far. Raises `CredentialRefused` or
        `ProtocolRefused`; bytes to send may be left then, which tell the other side."""
        try:
            if self._tls is None:
                context = self._contexts.server if self.server else self._contexts.client
                self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self.server)
            self._tls.do_handshake()
            self.peer = peer_certificate(self._tls)
        except ssl.SSLWantReadError:
            return
        except ssl.SSLCertVerificationError as error:
            text = f"its certificate is not signed by a CA of the setting 'ca' of this node: {error.verify_message}"
            raise CredentialRefused(text) from error
        except ssl.SSLError as error:
            raise self._refused(error) from error

    def receive(self, data: bytes) -> None:
        """Take bytes of the connection. Raises `ProtocolRefused` if they are not TLS."""
        if self._first and data[0] not in (HANDSHAKE_RECORD, ALERT_RECORD):
            raise ProtocolRefused(NO_TLS)
        self._first = False
        self._incoming.write(data)

    def read(self) -> bytes:
        """The plain bytes of all whole records received so far. Raises `ProtocolRefused` for a record that was changed,
        and at the end of TLS, which no node sends; `CredentialRefused` if the other side refused this node's
        certificate."""
        assert self._tls is not None
        parts = []
        try:
            # Asked first, because an error that is raised and caught takes longer than the rest of a frame.
            while self._incoming.pending or self._tls.pending():
                part = self._tls.read(RECORD_BYTES)
                if not part:
                    raise ProtocolRefused("the other side ended TLS")
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._refused(error) from error
        return b"".join(parts)

    def write(self, plain: bytes) -> bytes:
        """Encrypt bytes; returns those to send."""
        assert self._tls is not None
        view = memoryview(plain)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    def to_send(self) -> bytes:
        """The bytes of the handshake that are to be sent now."""
        return self._outgoing.read()

    def _refused(self, error: ssl.SSLError) -> CredentialRefused | ProtocolRefused:
        reason = error.reason or str(error)
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
            return CredentialRefused(
                f"it refused the certificate of this node, which '{self._contexts.issuer}' issued: {alert}"
            )
        return ProtocolRefused(f"TLS failed: {reason.replace('_', ' ').lower()}")
