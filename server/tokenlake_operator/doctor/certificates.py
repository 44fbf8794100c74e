"""The files of the settings `certificate`, `key` and `ca`."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tokenlake.config import ServerConfig
from tokenlake_operator.doctor.base import Finding, refusal
from tokenlake_server.peers.certificates import (
    CertificateFiles,
    certificate_of,
    context_of,
    read_certificates,
    shown,
    signed,
)
from tokenlake_server.peers.identity import node_uri

SOON = datetime.timedelta(days=7)
_USAGES = {
    ExtendedKeyUsageOID.SERVER_AUTH: "server auth",
    ExtendedKeyUsageOID.CLIENT_AUTH: "client auth",
}


def check_certificates(config: ServerConfig, now: datetime.datetime) -> Iterator[Finding]:
    """`now`: with its time zone."""
    if not config.certificate:
        return
    issue = f"run `tokenlake ca issue {config.node} --renew` where the CA is, and copy both files here"
    read: list[list[x509.Certificate]] = []

    def read_both() -> None:
        read.extend(read_certificates(name, Path(getattr(config, name))) for name in ("certificate", "ca"))

    yield from refusal("certificate-file", read_both)
    if len(read) < 2:
        return
    [own, *intermediates], authorities = read
    files = CertificateFiles(Path(config.certificate), Path(config.key), Path(config.ca))
    yield from refusal("key", lambda: context_of(files, ssl.PROTOCOL_TLS_SERVER, authorities))
    where = f"certificate = {config.certificate}"
    uri, expected = certificate_of(own).uri, node_uri(config.cluster, config.node)
    if uri != expected:
        problem = f"it is for {uri or 'no single SPIFFE URI'}, and this node is {expected}"
        cure = f"correct 'node' and 'cluster'; or {issue}"
        yield Finding("error", "certificate-name", where, problem, cure)
    yield from _times("certificate", where, own, now, issue)
    if not signed(own, intermediates, authorities):
        problem = f"its issuer, {own.issuer.rfc4514_string()}, is not in {config.ca}: nodes with this 'ca' refuse it"
        cure = (
            "issue a certificate of the CA that is there; or, if the CA that issued it belongs to this cluster, put it "
            "into 'ca' of all nodes"
        )
        yield Finding("error", "certificate-ca", where, problem, cure)
    yield from _usages(own, where, issue)
    names = [str(each.value) for each in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if config.control and config.node not in names + _dns_names(own):
        problem = f"its common name is {names[0] if names else 'empty'}: callers of the control plane refuse it"
        yield Finding(
            "warning", "certificate-common-name", where, problem, f"give it the common name {config.node}: {issue}"
        )
    for each in authorities:
        subject = each.subject.rfc4514_string()
        cure = f"make a new CA, add it to 'ca' of all nodes, issue new certificates, then remove {subject}"
        yield from _times("ca", f"ca = {config.ca}, {subject}", each, now, cure)


def _times(
    setting: str, where: str, certificate: x509.Certificate, now: datetime.datetime, cure: str
) -> Iterator[Finding]:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        yield Finding("error", f"{setting}-expired", where, f"it expired at {shown(end)}", cure)
    elif now < begin:
        problem = f"it is valid from {shown(begin)} on, and the clock of this machine says {shown(now)}"
        yield Finding("error", f"{setting}-early", where, problem, f"set the clock right (`timedatectl`), or {cure}")
    elif end - now < SOON:
        yield Finding("warning", f"{setting}-expires", where, f"it expires at {shown(end)}", cure)


def _usages(own: x509.Certificate, where: str, issue: str) -> Iterator[Finding]:
    try:
        found = set(own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    lacking = [name for usage, name in _USAGES.items() if usage not in found]
    if lacking:
        problem = f"it lacks the extended key usage {' and '.join(lacking)}: it is not one of a node"
        yield Finding("error", "certificate-usage", where, problem, issue)


def _dns_names(own: x509.Certificate) -> list[str]:
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    found: Sequence[str] = names.get_values_for_type(x509.DNSName)
    return list(found)
