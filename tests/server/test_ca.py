"""`tokenlake ca`: the files it writes, and what it refuses."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tokenlake_server.ca import ca


def run(*arguments: object) -> Result:
    return CliRunner().invoke(ca, [str(argument) for argument in arguments])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "ca"
    assert run("init", "--directory", place, "--cluster", "lake").exit_code == 0
    return place


def test_a_certificate_names_the_node_and_its_cluster(directory: Path) -> None:
    issued = run("issue", "n1", "--directory", directory, "--address", "10.0.0.1", "--address", "n1.example")
    assert issued.exit_code == 0
    certificate = x509.load_pem_x509_certificate((directory / "n1.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://lake/tokenlake/node/n1"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["n1.example"]


def test_only_certificates_are_readable_by_others(directory: Path) -> None:
    run("issue", "n1", "--directory", directory)
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "n1.pem": 0o644, "n1-key.pem": 0o600}


@pytest.mark.parametrize("days", ["0.5", "30"])
def test_the_validity_is_an_option(directory: Path, days: str) -> None:
    assert run("issue", "n1", "--directory", directory, "--days", days).exit_code == 0
    certificate = x509.load_pem_x509_certificate((directory / "n1.pem").read_bytes())
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert abs(left.total_seconds() - float(days) * 86400) < 60


def test_no_certificate_outlives_the_authority(directory: Path) -> None:
    issued = run("issue", "n1", "--directory", directory, "--days", "9999")
    certificate, authority = (
        x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes()) for name in ("n1", "ca")
    )
    assert certificate.not_valid_after_utc == authority.not_valid_after_utc
    assert f"valid until {authority.not_valid_after_utc:%Y-%m-%d}" in issued.output


def test_a_name_without_a_certificate_is_not_renewed(directory: Path) -> None:
    refused = run("issue", "n1", "--directory", directory, "--renew")
    assert refused.exit_code == 1
    assert "n1.pem does not exist" in refused.output
    assert not (directory / "n1.pem").exists()


def test_renewal_replaces_both_files(directory: Path) -> None:
    run("issue", "n1", "--directory", directory)
    before = [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")]
    refused = run("issue", "n1", "--directory", directory)
    assert refused.exit_code == 1
    assert "n1.pem exists already; use --renew" in refused.output
    assert [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")] == before
    assert run("issue", "n1", "--directory", directory, "--renew").exit_code == 0
    after = [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")]
    assert not set(before) & set(after)


def test_renewal_replaces_no_key_of_another_node(directory: Path) -> None:
    run("issue", "n1", "--directory", directory)
    before = (directory / "n1-key.pem").read_bytes()
    refused = run("issue", "n1-key", "--directory", directory, "--renew")
    assert refused.exit_code == 1
    assert "n1-key.pem is no certificate but the key of another node" in refused.output
    assert (directory / "n1-key.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("init",), "ca.pem exists already; a CA is never replaced"),
        (("issue", "a/b"), "the name of a node is 'a/b'; expected 1 to 64"),
        (("issue", ""), "the name of a node is ''"),
        (("issue", "ca"), "would share the files of the CA"),
        (("issue", "n1", "--days", "0"), "0"),
        (("issue", "n1", "--days", "1e9"), "days=1000000000"),
        (("issue", "n1", "--address", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"), "address"),
    ],
)
def test_refusals(directory: Path, arguments: tuple[str, ...], expected: str) -> None:
    refused = run(*arguments, "--directory", directory)
    assert refused.exit_code in (1, 2)
    assert expected in refused.output
    assert refused.exception is None or isinstance(refused.exception, SystemExit)


def foreign(directory: Path, *names: x509.GeneralName) -> None:
    """Replace the certificate of the CA by one with other names, or with none."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another CA")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (directory / "ca.pem").write_bytes(pem)


URI = x509.UniformResourceIdentifier


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "ca.pem was not made by `tokenlake ca init`"),
        ([x509.DNSName("example.org")], "expected one URI spiffe://CLUSTER in it, not none"),
        ([URI("spiffe://a"), URI("spiffe://b")], "expected one URI spiffe://CLUSTER in it, not spiffe://a, spiffe://b"),
        ([URI("https://example.org")], "not https://example.org"),
    ],
)
def test_the_certificate_of_another_ca(directory: Path, names: list[x509.GeneralName], expected: str) -> None:
    foreign(directory, *names)
    refused = run("issue", "n1", "--directory", directory)
    assert refused.exit_code == 1
    assert isinstance(refused.exception, SystemExit), refused.exception
    assert expected in refused.output


def test_an_encrypted_key_of_the_ca(directory: Path) -> None:
    encryption = serialization.BestAvailableEncryption(b"secret")
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (directory / "ca-key.pem").write_bytes(pem)
    refused = run("issue", "n1", "--directory", directory)
    assert isinstance(refused.exception, SystemExit), refused.exception
    assert "ca-key.pem was not made by `tokenlake ca init`, or has changed" in refused.output


def test_a_name_of_a_tenant_is_named_so(directory: Path) -> None:
    refused = run("issue", "alice", "--directory", directory, "--role", "reader", "--tenant", "a/b")
    assert "the name of a tenant is 'a/b'" in refused.output
    assert "the name of a caller is 'a/b'" in run("issue", "a/b", "--directory", directory, "--role", "reader").output


def test_a_directory_without_an_authority(tmp_path: Path) -> None:
    refused = run("issue", "n1", "--directory", tmp_path)
    assert refused.exit_code == 1
    assert "make a CA first: tokenlake ca init" in refused.output


def test_a_cluster_needs_a_valid_name(tmp_path: Path) -> None:
    refused = run("init", "--directory", tmp_path, "--cluster", "My Lake")
    assert refused.exit_code == 1
    assert "the name of a cluster is 'My Lake'" in refused.output


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused = run("init", "--directory", file / "ca")
    assert refused.exit_code == 1
    assert "Not a directory" in refused.output


def test_a_caller_has_a_role_and_cannot_serve(directory: Path) -> None:
    """A caller of the control plane has a role and cannot serve."""
    for arguments, uri in (
        (("--role", "admin"), "spiffe://lake/tokenlake/admin/alice"),
        (("--role", "scheduler", "--tenant", "red", "--renew"), "spiffe://lake/tokenlake/scheduler/red/alice"),
    ):
        issued = run("issue", "alice", "--directory", directory, *arguments)
        assert issued.exit_code == 0, issued.output
        assert f"role {arguments[1]}" in issued.output
        certificate = x509.load_pem_x509_certificate((directory / "alice.pem").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [uri]
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role", "root"),
        ("--tenant", "red"),
        ("--role", "reader", "--tenant", "a/b"),
        ("--role", "admin", "--tenant", "red"),
    ],
)
def test_roles_that_do_not_exist_are_refused(directory: Path, arguments: tuple[str, ...]) -> None:
    assert run("issue", "alice", "--directory", directory, *arguments).exit_code != 0
    assert not (directory / "alice.pem").exists()
