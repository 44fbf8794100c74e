"""The certificate of this node, and the checks of the certificates of others.

OpenSSL checks that a certificate is signed by a CA of the setting 'ca'. Its validity and the name in it are checked
here (`require_node`), once the connection is encrypted: both sides can then name the reason and the times.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import ssl
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from tokenlake.errors import ConfigurationError, CredentialRefused
from tokenlake_server.peers.identity import node_uri

log = logging.getLogger(__name__)

NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python's `ssl` does not name."""
_OTHERS = stat.S_IRWXO
LAST_PART = 0.1
"""Share of a certificate's validity before its end in which the log warns of it."""
WARN_S = 3600.0
"""Seconds between two warnings that this node's certificate expires, or that it is not valid."""


class CertificateFiles(NamedTuple):
    """The files of the settings `certificate`, `key` and `ca`."""

    certificate: Path
    key: Path
    ca: Path


class PeerCertificate(NamedTuple):
    """The facts of a certificate that OpenSSL found to be signed by a CA of this node."""

    uri: str
    """The SPIFFE identity; empty if there is none, or several."""
    begin: datetime.datetime
    end: datetime.datetime
    """The time within which all certificates of the chain are valid."""


class Contexts(NamedTuple):
    """TLS contexts made from one state of the files."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    issuer: str
    """The issuer of this node's certificate, for errors."""
    begin: datetime.datetime
    end: datetime.datetime
    """The time within which this node's certificate is valid."""


class Certificates:
    """The certificate, key and CAs of this node, read from files again when these change. `current` may be read from
    any thread; one thread at a time calls `reload`."""

    def __init__(self, files: CertificateFiles, cluster: str, node: str) -> None:
        """Read the files. Raises `ConfigurationError` for files that cannot be used."""
        self._files = files
        self._uri = node_uri(cluster, node)
        self._seen = self._states()
        self._problem = ""
        self._warned: tuple[str, float] = "", -math.inf
        """The kind of the last warning about the validity, and its time."""
        self.current = self._load()
        self._warn()

    def reload(self) -> None:
        """Read the files again if one of them changed since they were last read. Files that cannot be used, such as a
        certificate whose new key is not there yet, are logged, and tried again at the next call; until then the former
        ones are used. Connections that are open stay open."""
        self._warn()
        try:
            states = self._states()
            if states == self._seen:
                return
            self.current = self._load()
        except ConfigurationError as error:
            if str(error) != self._problem:
                log.error("the former certificates stay in use: %s", error)
                self._problem = str(error)
        else:
            self._seen = states
            self._problem = ""
            self._warned = "", -math.inf
            log.info("the changed files of 'certificate', 'key' and 'ca' are in use for new connections")

    def _warn(self) -> None:
        """Log that this node's certificate is not valid, or soon will not be."""
        begin, end = self.current.begin, self.current.end
        now = datetime.datetime.now(datetime.UTC)
        kind = "not valid" if not begin <= now <= end else "expires" if end - now < LAST_PART * (end - begin) else ""
        last, logged_at = self._warned
        if not kind or (kind == last and time.monotonic() - logged_at < WARN_S):
            return
        self._warned = kind, time.monotonic()
        if kind == "expires":
            log.warning("the certificate of this node expires at %s; renew %s", shown(end), self._files.certificate)
        else:
            log.error("other nodes refuse this node: %s", _outside("its certificate", (begin, end), now))

    def _states(self) -> list[tuple[int, int, int]]:
        found = []
        for name, path in self._files._asdict().items():
            try:
                status = path.stat()
            except OSError as error:
                raise ConfigurationError(name, str(path), f"a file that can be read ({error.strerror})") from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return found

    def _load(self) -> Contexts:
        files = self._files
        [own, *intermediates] = read_certificates("certificate", files.certificate)
        uri = _uri(own)
        if uri != self._uri:
            has = f"one for {uri}" if uri else "one without a single SPIFFE URI"
            raise ConfigurationError("certificate", str(files.certificate), f"a certificate for {self._uri}, not {has}")
        authorities = read_certificates("ca", files.ca)
        server = context_of(files, ssl.PROTOCOL_TLS_SERVER, authorities)
        # A resumed session would skip the checks of the certificate.
        server.num_tickets = 0
        client = context_of(files, ssl.PROTOCOL_TLS_CLIENT, authorities)
        if not signed(own, intermediates, authorities):
            log.error(
                "the certificate of this node, %s, is not signed by a CA in %s: nodes with the same 'ca' refuse it",
                files.certificate,
                files.ca,
            )
        return Contexts(server, client, own.issuer.rfc4514_string(), *_valid([own]))


def context_of(files: CertificateFiles, protocol: int, authorities: Sequence[x509.Certificate]) -> ssl.SSLContext:
    """A context for TLS with the certificate and key of `files`. Raises `ConfigurationError` for a key that is not that
    of the certificate, or that other users can read."""
    require_private(files.key)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= NO_CHECK_TIME | ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        # An empty password: a key that needs one is an error, and no question in a terminal.
        context.load_cert_chain(files.certificate, files.key, "")
    except (ssl.SSLError, OSError) as error:
        expected = f"the unencrypted private key of {files.certificate} in PEM, of the same issue ({_reason(error)})"
        raise ConfigurationError("key", str(files.key), expected) from error
    context.load_verify_locations(cadata=b"".join(_der(each) for each in authorities))
    return context


def peer_certificate(tls: ssl.SSLObject) -> PeerCertificate:
    """The facts of the other side's certificate on a connection whose TLS handshake is complete."""
    chain = [x509.load_der_x509_certificate(each) for each in _verified_chain(tls)]
    return PeerCertificate(_uri(chain[0]), *_valid(chain))


def require_node(found: PeerCertificate, cluster: str, node: str | None, now: datetime.datetime) -> str:
    """Check that a certificate is valid now and names a node of `cluster`: `node`, or any if it is None. Returns the
    node's name. Raises `CredentialRefused`, whose text names no other node."""
    prefix = node_uri(cluster, "")
    name = found.uri.removeprefix(prefix)
    if not found.uri:
        raise CredentialRefused(f"its certificate has no single SPIFFE URI; expected {prefix}NAME")
    if not found.uri.startswith(prefix) or not name or "/" in name:
        raise CredentialRefused(f"its certificate is for {found.uri}, which is no node of the cluster '{cluster}'")
    if node is not None and name != node:
        raise CredentialRefused(f"its certificate is for node '{name}', and another node was dialled at this address")
    require_valid(f"the certificate of node '{name}'", found, now)
    return name


def require_valid(what: str, found: PeerCertificate, now: datetime.datetime) -> None:
    """Raises `CredentialRefused` if a certificate, called `what` in the text, is not valid now."""
    if not found.begin <= now <= found.end:
        raise CredentialRefused(_outside(what, (found.begin, found.end), now))


def certificate_of(certificate: x509.Certificate) -> PeerCertificate:
    """The facts of one certificate."""
    return PeerCertificate(_uri(certificate), *_valid([certificate]))


def shown(moment: datetime.datetime) -> str:
    """A time in UTC, to the minute, so that the texts of repeated refusals are equal and are logged once a minute."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _outside(what: str, valid: tuple[datetime.datetime, datetime.datetime], now: datetime.datetime) -> str:
    begin, end = valid
    state = "has expired" if now > end else "is not valid yet"
    times = f"it is valid from {shown(begin)} to {shown(end)}"
    return f"{what} {state}: {times}, and the clock of the node that checks it says {shown(now)}"


def _verified_chain(tls: ssl.SSLObject) -> list[bytes]:
    """The certificates from the other side's up to the CA, in DER."""
    if hasattr(tls, "get_verified_chain"):
        chain: list[bytes] = tls.get_verified_chain()
        return chain
    # Python before 3.13 has the method on the object inside only.
    inner = tls._sslobj  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in inner.get_verified_chain()]


def signed(
    own: x509.Certificate, intermediates: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> bool:
    """True if a chain of signatures leads from `own` over `intermediates` to one of `authorities`."""
    reached, left = [own], list(intermediates)
    while reached:
        each = reached.pop()
        if each in authorities or any(_issued(each, authority) for authority in authorities):
            return True
        reached += [issuer for issuer in left if _issued(each, issuer)]
        left = [issuer for issuer in left if issuer not in reached]
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _valid(chain: Sequence[x509.Certificate]) -> tuple[datetime.datetime, datetime.datetime]:
    return max(each.not_valid_before_utc for each in chain), min(each.not_valid_after_utc for each in chain)


def _uri(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ""
    found = names.get_values_for_type(x509.UniformResourceIdentifier)
    return found[0] if len(found) == 1 else ""


def read_certificates(name: str, path: Path) -> list[x509.Certificate]:
    """The certificates of a file in PEM, which the setting `name` names. Raises `ConfigurationError`."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(name, str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigurationError(name, str(path), f"a file with certificates in PEM ({error})") from error


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def require_private(path: Path) -> None:
    """Raises `ConfigurationError` for a key that other users can read."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise ConfigurationError("key", str(path), f"a file that can be read ({error.strerror})") from error
    if mode & _OTHERS:
        expected = f"a file that other users cannot read; its mode is {mode:04o}: chmod 600 {path}"
        raise ConfigurationError("key", str(path), expected)


def _reason(error: OSError) -> str:
    reason: str = getattr(error, "reason", None) or error.strerror or str(error)
    return reason
