"""The files of the settings `certificate`, `key` and `ca`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tokenlake.config import ServerConfig
from tokenlake.errors import ConfigurationError
from tokenlake_operator.doctor.base import Finding
from tokenlake_server.peers.certificates import certificate_of, read_certificates, require_private, shown, signed
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
    try:
        [own, *intermediates] = read_certificates("certificate", Path(config.certificate))
        authorities = read_certificates("ca", Path(config.ca))
    except ConfigurationError as error:
        where = f"{error.field} = {error.value}"
        yield Finding("error", "certificate-file", where, "it cannot be used", f"give {error.expected}")
        return
    yield from _key(config, own, issue)
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


def _key(config: ServerConfig, own: x509.Certificate, issue: str) -> Iterator[Finding]:
    path, where = Path(config.key), f"key = {config.key}"
    try:
        require_private(path)
    except ConfigurationError as error:
        yield Finding(
            "error", "key-file", where, "other users can read it, or it cannot be read", f"give {error.expected}"
        )
        if not path.exists():
            return
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        yield Finding("error", "key-file", where, f"it is no unencrypted private key in PEM ({error})", issue)
        return
    if key.public_key() != own.public_key():
        yield Finding(
            "error", "key-pair", where, "it is the key of another certificate", f"use both files of one issue: {issue}"
        )


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
