"""`tokenlake ca`: a certificate authority in a directory, for teams that have none, and the certificates of nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tokenlake.config import ServerConfig
from tokenlake.config.setting import settings_of
from tokenlake_server.peers.certificates import shown
from tokenlake_server.peers.identity import ROLES, cluster_uri, node_uri, role_uri

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca-key.pem"
EARLY = datetime.timedelta(minutes=5)
"""A new certificate is valid from this long before its issue, because the clocks of machines differ."""


@click.group()
def ca() -> None:
    """Make a certificate authority (CA), and certificates of nodes."""


_directory = click.option(
    "--directory",
    default=".",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the CA.",
)


@ca.command("init")
@_directory
@click.option("--cluster", default=ServerConfig().cluster, show_default=True, help="Name of the cluster.")
@click.option(
    "--days",
    default=3650.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Days for which the CA is valid.",
)
def _init(directory: Path, cluster: str, days: float) -> None:
    """Make a CA: its certificate ca.pem, which every node gets, and its key ca-key.pem, which no node needs."""
    try:
        certificate, key = init_ca(directory, cluster, days)
    except (OSError, ValueError, OverflowError) as error:
        raise click.ClickException(_text(error)) from error
    click.echo(f"{certificate}: the setting 'ca' of every node\n{key}: keep it off the nodes")


@ca.command("issue")
@click.argument("name")
@_directory
@click.option(
    "--address",
    "addresses",
    multiple=True,
    help="IP address or host name that the certificate also names; may be repeated.",
)
@click.option(
    "--days",
    default=365.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Days for which the certificate is valid.",
)
@click.option("--renew", is_flag=True, help="Replace the files of NAME; a running daemon reads the new ones.")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    help="Make the certificate of a caller of the control plane called NAME, with this role, and not of a node.",
)
@click.option("--tenant", default="", help="With --role: the tenant for which alone the caller may act.")
def _issue(
    name: str,
    directory: Path,
    addresses: tuple[str, ...],
    days: float,
    renew: bool,
    role: str | None,
    tenant: str,
) -> None:
    """Make the certificate NAME.pem and the key NAME-key.pem of node NAME, or with --role of a caller of the control
    plane. It ends with the CA at the latest."""
    if renew and not (directory / f"{name}.pem").exists():
        raise click.ClickException(f"{directory / name}.pem does not exist; issue it without --renew")
    try:
        certificate, key = issue(directory, name, addresses, days, renew=renew, role=role or "", tenant=tenant)
        end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError, OverflowError) as error:
        raise click.ClickException(_text(error)) from error
    if role:
        click.echo(f"{certificate}: for '{name}' with the role {role}, valid until {shown(end)}\n{key}: its key")
        return
    click.echo(f"{certificate}: the setting 'certificate' of node {name}, valid until {shown(end)}")
    click.echo(f"{key}: its setting 'key'")


def init_ca(directory: Path, cluster: str, days: float = 3650) -> tuple[Path, Path]:
    """Make a CA for the nodes of `cluster`. Returns the files of its certificate and of its key. Raises ValueError for
    a name that is not valid and a CA that exists, OSError where the files cannot be written."""
    _check("cluster", cluster)
    files = directory / CA_CERTIFICATE, directory / CA_KEY
    _refuse_existing(files, "a CA is never replaced; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # A number, because refusals name the CA of a certificate, and a cluster may have had several.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{cluster} CA {secrets.token_hex(3)}")])
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_names([x509.UniformResourceIdentifier(cluster_uri(cluster))]), critical=False)
    )
    return _write(files, builder.sign(key, hashes.SHA256()), key)


def issue(
    directory: Path,
    node: str,
    addresses: Sequence[str] = (),
    days: float = 365,
    *,
    begin: datetime.datetime | None = None,
    renew: bool = False,
    role: str = "",
    tenant: str = "",
) -> tuple[Path, Path]:
    """Make a certificate that the CA in `directory` signs, in the same directory: of the node `node` or, with a `role`,
    of a caller of the control plane called `node`, which with a `tenant` may act for this tenant only. It is valid for
    `days` from `begin` on, or from `EARLY` before now, and not beyond the end of the CA. Returns the files of the
    certificate and of its key. Raises ValueError for a name or address that is not valid, a directory without a CA, and
    without `renew` for files that exist; OSError for files that cannot be read or written."""
    _check("node", node, "caller" if role else "node")
    if tenant:
        _check("node", tenant, "tenant")
    if tenant and role not in ("reader", "scheduler"):
        raise ValueError("a tenant is only for the roles reader and scheduler; nodes and admins serve all tenants")
    authority, authority_key, cluster = _read_ca(directory)
    files = directory / f"{node}.pem", directory / f"{node}-key.pem"
    if node in ("ca", "ca-key"):
        raise ValueError(f"a node called '{node}' would share the files of the CA; choose another name")
    if renew and files[0].exists() and not files[0].read_bytes().startswith(b"-----BEGIN CERTIFICATE"):
        raise ValueError(f"{files[0]} is no certificate but the key of another node; choose another directory")
    if not renew:
        _refuse_existing(files, "use --renew to replace it")
    uri = role_uri(cluster, role, node, tenant) if role else node_uri(cluster, node)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    # A caller of the control plane cannot pose as a daemon.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if role else [ExtendedKeyUsageOID.SERVER_AUTH])]
    names = [x509.UniformResourceIdentifier(uri), *map(_address, addresses)]
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(name, authority.subject, key, days, begin, authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(_names(names), critical=False)
        .add_extension(authority_id, critical=False)
    )
    return _write(files, builder.sign(authority_key, hashes.SHA256()), key)


def _read_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, str]:
    """The certificate of the CA in `directory`, its key, and the name of its cluster. Raises ValueError for files that
    `tokenlake ca init` did not make, OSError for files that cannot be read."""
    files = directory / CA_CERTIFICATE, directory / CA_KEY
    file = files[0]
    try:
        authority = x509.load_pem_x509_certificate(file.read_bytes())
        found = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        file = files[1]
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} does not exist; make a CA first: tokenlake ca init") from error
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        # TypeError: the key is encrypted.
        raise ValueError(f"{file} was not made by `tokenlake ca init`, or has changed: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{files[1]} was not made by `tokenlake ca init`: it is not an elliptic-curve key")
    if len(uris) != 1 or not uris[0].startswith(cluster_uri("")):
        raise ValueError(
            f"{files[0]} was not made by `tokenlake ca init`: expected one URI {cluster_uri('CLUSTER')} in it, not "
            f"{', '.join(uris) or 'none'}"
        )
    return authority, key, uris[0].removeprefix(cluster_uri(""))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    begin: datetime.datetime | None = None,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """A certificate that is valid for `days`, but not beyond `latest`."""
    now = datetime.datetime.now(datetime.UTC)
    end = (begin or now) + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin or now - EARLY)
        .not_valid_after(min(end, latest or end))
    )


def _key_usage(**used: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


def _names(names: Sequence[x509.GeneralName]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(names)


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text):
            raise ValueError(f"the address is {text!r}; expected an IP address or a host name") from None
        return x509.DNSName(text)


def _check(field: str, value: str, named: str = "") -> None:
    """Raise ValueError for a name that the daemon's setting `field` does not accept. `named`: the kind of thing that
    has the name, by default the field."""
    try:
        settings_of(ServerConfig)[field].kind.parse(value)
    except ValueError as error:
        raise ValueError(f"the name of a {named or field} is {value!r}; expected {error}") from None


def _refuse_existing(files: Sequence[Path], remedy: str) -> None:
    for file in files:
        if file.exists():
            raise ValueError(f"{file} exists already; {remedy}")


def _write(
    files: tuple[Path, Path], certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    """Write both files under other names first, so that a daemon never reads half a file."""
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    new = [file.with_suffix(".new") for file in files]
    with _open_private(new[0]) as file:
        file.write(certificate.public_bytes(pem))
    new[0].chmod(0o644)
    with _open_private(new[1]) as file:
        file.write(key.private_bytes(pem, *plain))
    for source, target in zip(new, files, strict=True):
        os.replace(source, target)
    return files


def _open_private(path: Path) -> BinaryIO:
    """Open an empty file for writing, with mode 0600 whatever the umask is. A file that exists is emptied and gets that
    mode. Raises OSError, also where the file belongs to another user."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "wb", opener=opened)


def _text(error: Any) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
