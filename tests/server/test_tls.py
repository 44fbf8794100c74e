"""TLS in memory: handshakes, bytes that are no TLS, records that were changed."""

from __future__ import annotations

import contextlib
import datetime
import ssl
from pathlib import Path

import pytest

from tests.server.certified import authority, files
from tokenlake.errors import CredentialRefused, ProtocolRefused
from tokenlake.wire import pack_frame, peer
from tokenlake_server.ca import init_ca, issue
from tokenlake_server.peers.certificates import CertificateFiles, Certificates, Contexts, PeerCertificate, require_node
from tokenlake_server.peers.tls import TlsSession, is_tls

NOW = datetime.datetime.now(datetime.UTC)
"""The time at which the tests were collected, which may be half an hour before a test runs."""
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("certificates") / "ca")


def contexts(ca: Path, node: str) -> Contexts:
    own = files(ca, node)
    paths = CertificateFiles(Path(own["certificate"]), Path(own["key"]), Path(own["ca"]))
    return Certificates(paths, "tokenlake", node).current


def session(ca: Path, node: str, *, server: bool) -> TlsSession:
    return TlsSession(contexts(ca, node), server=server)


def connected(ca: Path) -> tuple[TlsSession, TlsSession]:
    a, b = session(ca, "a", server=False), session(ca, "b", server=True)
    while a.peer is None or b.peer is None:
        for one, other in ((a, b), (b, a)):
            if one.peer is None:
                one.handshake()
            data = one.to_send()
            if data:
                other.receive(data)
    return a, b


@pytest.mark.parametrize("size", [1, 300, 16 << 10, (16 << 10) + 1, 1 << 20])
def test_bytes_arrive_in_pieces_of_any_size(ca: Path, size: int) -> None:
    a, b = connected(ca)
    assert a.peer is not None
    assert b.peer is not None
    now = datetime.datetime.now(datetime.UTC)
    assert require_node(a.peer, "tokenlake", "b", now) == "b"
    assert require_node(b.peer, "tokenlake", None, now) == "a"
    plain = bytes(range(256)) * (size // 256 + 1)
    encrypted = a.write(plain)
    found = b""
    for at in range(0, len(encrypted), 10_007):
        b.receive(encrypted[at : at + 10_007])
        found += b.read()
    assert found == plain


def test_a_changed_byte_is_refused(ca: Path) -> None:
    a, b = connected(ca)
    encrypted = bytearray(a.write(b"frame"))
    encrypted[-1] ^= 1
    b.receive(bytes(encrypted))
    with pytest.raises(ProtocolRefused, match="TLS failed"):
        b.read()


def test_an_end_of_tls_ends_the_connection(ca: Path) -> None:
    """`read` would otherwise find no end of the bytes behind it."""
    b = session(ca, "b", server=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    a = contexts(ca, "a").client.wrap_bio(incoming, outgoing)
    while b.peer is None:
        with contextlib.suppress(ssl.SSLWantReadError):
            a.do_handshake()
        b.receive(outgoing.read())
        b.handshake()
        incoming.write(b.to_send())
    with contextlib.suppress(ssl.SSLWantReadError):
        a.unwrap()
    b.receive(outgoing.read())
    with pytest.raises(ProtocolRefused, match="ended TLS"):
        b.read()


def test_a_frame_is_no_tls(ca: Path) -> None:
    a = session(ca, "a", server=False)
    a.handshake()
    hello = a.to_send()
    assert all(is_tls(hello[:count]) for count in range(1, 8))
    refusal = pack_frame(peer.PeerRefused("ProtocolRefused", "x" * 9))
    assert not is_tls(refusal)
    with pytest.raises(ProtocolRefused, match="without TLS"):
        a.receive(refusal)
    frame = 0x316.to_bytes(4, "little") + bytes(0x316)
    assert not is_tls(frame)


URI = "spiffe://tokenlake/tokenlake/node/"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", "no single SPIFFE URI"),
        ("spiffe://other/tokenlake/node/b", "no node of the cluster 'tokenlake'"),
        ("spiffe://tokenlake.example/tokenlake/node/b", "no node of the cluster"),
        ("spiffe://tokenlake/other/node/b", "no node of the cluster"),
        (URI, "no node of the cluster"),
        (f"{URI}b/c", "no node of the cluster"),
        (f"{URI}c", "is for node 'c', and another node was dialled"),
    ],
)
def test_names_that_are_refused(uri: str, reason: str) -> None:
    with pytest.raises(CredentialRefused, match=reason) as refused:
        require_node(PeerCertificate(uri, NOW - DAY, NOW + DAY), "tokenlake", "b", NOW)
    assert "'b'" not in str(refused.value), "the name that was dialled is not told"


@pytest.mark.parametrize(("begin", "end", "reason"), [(-2, -1, "has expired"), (1, 2, "is not valid yet")])
def test_times_that_are_refused(begin: int, end: int, reason: str) -> None:
    certificate = PeerCertificate(f"{URI}b", NOW + begin * DAY, NOW + end * DAY)
    with pytest.raises(CredentialRefused, match=f"'b' {reason}: it is valid from .* UTC to .* UTC, and the clock"):
        require_node(certificate, "tokenlake", "b", NOW)


@pytest.mark.parametrize(
    ("begin", "days", "expected"),
    [(-10, 1, "has expired"), (5, 1, "is not valid yet"), (-9.5, 10, "expires at"), (-5, 10, "")],
)
def test_the_log_warns_of_the_end_of_the_own_certificate(
    ca: Path, begin: float, days: float, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = issue(ca, "w", days=days, begin=NOW + begin * DAY, renew=True)
    own = Certificates(CertificateFiles(certificate, key, ca / "ca.pem"), "tokenlake", "w")
    own.reload()
    assert expected in caplog.text
    assert len(caplog.records) == bool(expected), "once an hour"


def test_the_log_names_an_authority_that_is_not_trusted(
    ca: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names a certificate of an authority that this node does not trust."""
    other, _ = init_ca(tmp_path / "other", "tokenlake")
    files = CertificateFiles(*issue(ca, "w", renew=True), ca / "ca.pem")
    Certificates(files, "tokenlake", "w")
    assert not caplog.records
    Certificates(files._replace(ca=other), "tokenlake", "w")
    assert f"is not signed by a CA in {other}" in caplog.text
