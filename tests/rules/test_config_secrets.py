"""Tenants and secrets: their sources, refused values, and that no output shows them."""

from __future__ import annotations

import pytest

from tests.rules.settings import CERTIFICATE, SECRET, load, tenant
from tokenlake.config import Secret, Tenant, load_config
from tokenlake.errors import ConfigurationError


def test_tenants_come_from_the_file() -> None:
    toml = tenant("a", uids=[1, 2]) + tenant("b", tokens=["t"])
    secret = Secret(bytes.fromhex(SECRET))
    assert load(toml).config.tenants == (Tenant("a", secret, uids=(1, 2)), Tenant("b", secret, tokens=("t",)))
    assert load(tenant("a", quota=0.5)).config.tenants[0].quota == 0.5


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        (tenant(secret=None), "missing required field `secret`"),
        (tenant(secret="00" * 15), "32 to 128 hexadecimal digits - at `.*secret"),
        (tenant(secret="00" * 65), "32 to 128 hexadecimal digits"),
        (tenant(secret="0g" * 16), "32 to 128 hexadecimal digits"),
        (tenant("a b"), "at `.*name"),
        (tenant(uids=["x"]), "Expected `int`, got `str` - at `.*uids"),
        (tenant(uids=[1, 1]), "each of the uids once"),
        (tenant(tokens="t"), "Expected `array`, got `str` - at `.*tokens"),
        (tenant(tokens=[""]), "length >= 1 - at `.*tokens"),
        (tenant(user="x"), "unknown field `user`"),
        *((tenant().rstrip() + f"\nquota = {quota}\n", "at `.*quota") for quota in (0, 1.5, "'half'", "nan", "true")),
        (tenant() + tenant(), "given twice: a"),
        (tenant(uids=[1]) + tenant("b", uids=[1]), "each of the uids once"),
        (tenant(tokens=["hush"]) + tenant("b", tokens=["hush"]), "each of the tokens once"),
        ("tenants = 1", "an array of tables"),
    ],
)
def test_tenants_that_are_refused(toml: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tenants.*{reason}") as caught:
        load(toml)
    assert "hush" not in str(caught.value)
    assert "0g0g" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "environ"),
    [
        (tenant(uids=["x"]), {}),
        (tenant().replace("tenants", "tenant"), {}),
        (f"[clients]\nsecret = '{SECRET}'", {}),
        (f"secret = '{SECRET}'", {}),
        (f"cluster_secret = '{SECRET}0'", {}),
        (None, {"TOKENLAKE_CLUSTER_SECRET": f"{SECRET} {SECRET}"}),
        (None, {"TOKENLAKE_TENANTS": SECRET}),
        (None, {"TOKENLAKE_TENANT_TOKEN": SECRET}),
    ],
)
def test_no_error_shows_a_secret(toml: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(toml, environ)
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize("secrets", [[SECRET], [SECRET * 4], [SECRET, "ff" * 16], []])
def test_cluster_secrets(secrets: list[str]) -> None:
    """Cluster secrets come from file or environment and are masked."""
    joined = ",".join(secrets)
    environ = {"TOKENLAKE_CLUSTER_SECRET": joined}
    for settings in (load(f"cluster_secret = '{joined}'"), load(f"cluster_secret = {secrets}"), load(None, environ)):
        assert list(settings.config.cluster_secret) == [bytes.fromhex(secret) for secret in secrets]
        described = {field: value for field, value, _ in settings.describe()}
        assert described["cluster_secret"] == ", ".join(["***"] * len(secrets))
        for text in (repr(settings), str(settings.config), f"{settings.config.cluster_secret}"):
            assert not secrets or SECRET not in text
            assert repr(bytes.fromhex(SECRET)) not in text


@pytest.mark.parametrize("value", ["00" * 15, "00" * 65, "0g" * 16, "0" * 33, 16, ["00" * 16, "0"], [16]])
def test_a_cluster_secret_that_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"cluster_secret.*\*\*\*.*one secret or a list, each of 32 to 128 hexadecimal digits"
    ):
        load(f"cluster_secret = {value!r}")


def test_huge_pages_are_for_a_single_tenant() -> None:
    def tenants(*names: str) -> str:
        listed = "".join(f"[[tenants]]\nname = '{name}'\nsecret = '{SECRET}'\n" for name in names)
        return f"huge_pages = true\nmemory = '64MiB'\n{listed}"

    assert load(tenants("red")).config.huge_pages
    with pytest.raises(ConfigurationError, match=r"huge_pages.*several tenants"):
        load(tenants("red", "blue"))


def test_tenants_on_several_nodes_need_a_cluster_secret() -> None:
    peers = "a=127.0.0.1:1,b=127.0.0.1:2"
    for tenants in (tenant(), tenant() + tenant("b")):
        with pytest.raises(ConfigurationError, match="TOKENLAKE_CLUSTER_SECRET") as caught:
            load(tenants, node="a", listen="127.0.0.1:1", peers=peers)
        assert caught.value.field == "cluster_secret"
        assert str(caught.value).startswith("set 'cluster_secret'")
        load(tenants, {"TOKENLAKE_CLUSTER_SECRET": SECRET}, node="a", listen="127.0.0.1:1", peers=peers)
        load(tenants, node="a", listen="127.0.0.1:1", peers="a=127.0.0.1:1")
        load(tenants, node="a", listen="127.0.0.1:1", peers=peers, **CERTIFICATE)
    load(node="a", listen="127.0.0.1:1", peers=peers)


def test_describe_masks_secrets_and_names_origins() -> None:
    settings = load(
        f"cluster_secret = '{SECRET}'\n" + tenant(tokens=["hush"], uids=[7]),
        {"TOKENLAKE_MEMORY": "96MiB"},
        peers="b=127.0.0.1:1/1GiB",
    )
    described = {field: (value, origin) for field, value, origin in settings.describe()}
    assert described["memory"] == ("96MiB", "environment TOKENLAKE_MEMORY")
    assert described["peers"] == ("b=127.0.0.1:1/1GiB", "flag --peers")
    assert described["lease_s"] == ("10.0", "default")
    assert described["tenants"] == ("Tenant(name='a', secret=***, uids=(7), tokens=1, quota=1)", "file, line 2")
    for text in (str(described), repr(settings), str(settings.config)):
        assert SECRET not in text
        assert "hush" not in text
        assert repr(bytes.fromhex(SECRET)) not in text


def test_a_password_goes_to_no_other_machine_without_encryption() -> None:
    there = {"etcd": "10.0.0.9:2379", "etcd_user": "lake", **CERTIFICATE}
    with pytest.raises(ConfigurationError, match=r"'etcd_user'.*'etcd_ca'.*10.0.0.9:2379 without encryption"):
        load(**there)
    assert load(**there, etcd_ca="etcd-ca.pem").config.etcd_user == "lake"
    assert load(**there | {"etcd": "127.0.0.1:2379"}).config.etcd_user == "lake"
    assert load(**there, unencrypted_beyond_loopback=True).config.etcd_user == "lake"


def test_a_password_in_a_url_is_masked() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(toml_text="", environ={}, flags={"otlp": "http://alice:pass-word@x@collector:4318"}, uid=0)
    assert "collector:4318" in str(caught.value)
    assert "pass-word" not in str(caught.value)
