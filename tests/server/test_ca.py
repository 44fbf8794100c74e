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
    result = CliRunner().invoke(ca, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code in (1, 2), result.output
    return result.output


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "ca"
    assert run("init", "--directory", place, "--cluster", "lake").exit_code == 0
    return place


def test_a_certificate_names_the_node_and_its_cluster(directory: Path) -> None:
    run("issue", "n1", "--directory", directory, "--address", "10.0.0.1", "--address", "n1.example")
    certificate = read(directory / "n1.pem")
    certificate.verify_directly_issued_by(read(directory / "ca.pem"))
    names = names_of(certificate)
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://lake/tokenlake/node/n1"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["n1.example"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "n1.pem": 0o644, "n1-key.pem": 0o600}


@pytest.mark.parametrize("days", ["0.5", "30", "9999"])
def test_the_validity_is_an_option(directory: Path, days: str) -> None:
    """No certificate outlives the authority."""
    issued = run("issue", "n1", "--directory", directory, "--days", days)
    end, last = read(directory / "n1.pem").not_valid_after_utc, read(directory / "ca.pem").not_valid_after_utc
    asked = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=float(days))
    assert abs((end - min(asked, last)).total_seconds()) < 60
    assert f"valid until {end:%Y-%m-%d}" in issued.output


def test_renewal_replaces_both_files(directory: Path) -> None:
    assert "n1.pem does not exist" in refused("issue", "n1", "--directory", directory, "--renew")
    run("issue", "n1", "--directory", directory)
    before = [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")]
    assert "n1.pem exists already; use --renew" in refused("issue", "n1", "--directory", directory)
    other = refused("issue", "n1-key", "--directory", directory, "--renew")
    assert "n1-key.pem is no certificate but the key of another node" in other
    assert [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")] == before
    assert run("issue", "n1", "--directory", directory, "--renew").exit_code == 0
    after = [(directory / name).read_bytes() for name in ("n1.pem", "n1-key.pem")]
    assert not set(before) & set(after)


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
        (("issue", "n1", "--role", "root"), "root"),
        (("issue", "n1", "--tenant", "red"), ""),
        (("issue", "n1", "--role", "admin", "--tenant", "red"), ""),
        (("issue", "n1", "--role", "reader", "--tenant", "a/b"), "the name of a tenant is 'a/b'"),
        (("issue", "a/b", "--role", "reader"), "the name of a caller is 'a/b'"),
    ],
)
def test_refusals(directory: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*arguments, "--directory", directory)
    assert not (directory / "n1.pem").exists()


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
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "another CA")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (directory / "ca.pem").write_bytes(pem)
    assert expected in refused("issue", "n1", "--directory", directory)


def test_an_encrypted_key_of_the_ca(directory: Path) -> None:
    encryption = serialization.BestAvailableEncryption(b"secret")
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    (directory / "ca-key.pem").write_bytes(pem)
    expected = "ca-key.pem was not made by `tokenlake ca init`, or has changed"
    assert expected in refused("issue", "n1", "--directory", directory)


def test_places_and_names_of_an_authority(tmp_path: Path) -> None:
    assert "make a CA first: tokenlake ca init" in refused("issue", "n1", "--directory", tmp_path)
    expected = "the name of a cluster is 'My Lake'"
    assert expected in refused("init", "--directory", tmp_path, "--cluster", "My Lake")
    (tmp_path / "file").touch()
    assert "Not a directory" in refused("init", "--directory", tmp_path / "file" / "ca")


@pytest.mark.parametrize(
    ("arguments", "uri"),
    [
        (("--role", "admin"), "spiffe://lake/tokenlake/admin/alice"),
        (("--role", "scheduler", "--tenant", "red"), "spiffe://lake/tokenlake/scheduler/red/alice"),
    ],
)
def test_a_caller_has_a_role_and_cannot_serve(directory: Path, arguments: tuple[str, ...], uri: str) -> None:
    issued = run("issue", "alice", "--directory", directory, *arguments)
    assert f"role {arguments[1]}" in issued.output
    certificate = read(directory / "alice.pem")
    assert names_of(certificate).get_values_for_type(URI) == [uri]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
