"""Roles: who may call what, over the socket of the operator and with certificates."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, store
from tests.server.control.scene import certificates, local, remote, served, socket_of
from tests.server.scene import OF_THIS_USER, RED, tenants
from tokenlake.config import load_config
from tokenlake.errors import ConfigurationError, CredentialRefused, Unreachable
from tokenlake_client import Pool
from tokenlake_client.control import Control
from tokenlake_proto.v1 import admin_pb2, events_pb2, scheduling_pb2
from tokenlake_server.peers.identity import role_of
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


class Scene(NamedTuple):
    cluster: Cluster
    address: str
    ca: Path


@pytest.fixture(scope="module")
def one() -> Iterator[Scene]:
    cluster = Cluster(1, "4MiB", "1MiB", match_deadline_ms="2000")
    (address,) = served(cluster).values()
    with cluster:
        yield Scene(cluster, address, cluster.directory / "ca")


@pytest.mark.parametrize(
    ("role", "status", "layouts", "config"),
    [("reader", True, False, False), ("scheduler", True, True, False), ("admin", True, True, True)],
)
def test_each_role_may_call_its_methods(one: Scene, role: str, status: bool, layouts: bool, config: bool) -> None:
    with remote(one.address, "node0", certificates(one.ca, f"a-{role}", role)) as control:
        for call, allowed in ((control.status, status), (control.layouts, layouts), (control.config, config)):
            if allowed:
                call()
            else:
                with pytest.raises(CredentialRefused, match=rf"needs the role \w+, which 'a-{role}' does not have"):
                    call()
        assert control.status().node


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://tokenlake/tokenlake/admin/red/alice",
        "spiffe://tokenlake/tokenlake/root/alice",
        "spiffe://tokenlake/tokenlake/admin/",
        "spiffe://tokenlake/tokenlake/admin",
        "spiffe://tokenlake/tokenlake/reader/a/b/c",
        "spiffe://tokenlake2/tokenlake/admin/alice",
        "spiffe://tokenlake/other/admin/alice",
        "",
    ],
)
def test_other_identities_have_no_role(uri: str) -> None:
    assert role_of("tokenlake", uri) is None


def test_renewed_files_are_used_for_new_connections(one: Scene) -> None:
    from tokenlake_server.ca import issue

    held = certificates(one.ca, "renewer", "reader")
    before = remote(one.address, "node0", held)
    before.status()
    issue(one.ca, "node0", renew=True)
    with remote(one.address, "node0", held) as after, before:
        after.status()
        before.status()


def test_the_socket_is_the_operator_s_alone(one: Scene) -> None:
    path = socket_of(one.cluster.nodes[0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    with local(one.cluster.nodes[0]) as control:
        assert control.status().node == "node0"
    with pytest.raises(Unreachable):
        Control.local(path.with_name("nobody.control"))


def test_every_method_declares_a_role() -> None:
    from tokenlake_proto.v1 import role_pb2

    for file in (admin_pb2, events_pb2, scheduling_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert method.GetOptions().Extensions[role_pb2.role] != role_pb2.ROLE_UNSPECIFIED


def test_tenants_come_from_the_credential(tmp_path: Path) -> None:
    file = tenants(tmp_path, blue=OF_THIS_USER)
    cluster = Cluster(1, "4MiB", "1MiB", config=file)
    (address,) = served(cluster).values()
    ca = cluster.directory / "ca"
    with cluster, Pool.connect(cluster.nodes[0].socket, LAYOUT, RED, deadlines=PATIENT) as pool:
        store(pool, Prompt(1, 2))
        of = {tenant: certificates(ca, f"for-{tenant}", "scheduler", tenant) for tenant in ("red", "blue", "green")}
        with remote(address, "node0", of["red"]) as control:
            assert [each.model_id for each in control.layouts()] == ["test"]
            assert [each.tenant for each in control.status().pools] == ["red"]
            with pytest.raises(CredentialRefused, match="another tenant"):
                control.explain("", "blue")
        with remote(address, "node0", of["blue"]) as control:
            assert control.layouts() == []
            assert list(control.status().pools) == []
        with remote(address, "node0", of["green"]) as control, pytest.raises(CredentialRefused, match="no tenant"):
            control.layouts()
        anyone = certificates(ca, "anyone", "scheduler")
        with remote(address, "node0", anyone) as control, pytest.raises(CredentialRefused, match="several tenants"):
            control.layouts()
        with remote(address, "node0", anyone, RED) as control:
            assert len(control.layouts()) == 1
        with remote(address, "node0", anyone, "wrong") as control, pytest.raises(CredentialRefused, match="no tenant"):
            control.layouts()
        # The operator of the node names the tenant.
        with local(cluster.nodes[0]) as control:
            assert control.evict(everything=True, tenant="blue").evicted == 0
            assert control.evict(everything=True, tenant="red").evicted == 2
            with pytest.raises(CredentialRefused, match="several tenants"):
                control.evict(everything=True)


def test_settings_that_do_not_fit_are_refused() -> None:
    def settings(**flags: str) -> None:
        load_config(toml_text=None, environ={}, flags=flags, uid=0)

    with pytest.raises(ConfigurationError, match="'control'.*'certificate'"):
        settings(control="127.0.0.1:7442")
    with pytest.raises(ConfigurationError, match="control_socket"):
        settings(control_socket="/x/a.sock", socket="/x/a.sock")
    assert (
        load_config(toml_text=None, environ={}, flags={"socket": "/x/a.sock"}, uid=0).config.control_socket
        == "/x/a.control"
    )


def test_a_daemon_without_a_control_plane() -> None:
    with daemons(1, control_socket="") as cluster:
        assert not socket_of(cluster.nodes[0]).exists()
