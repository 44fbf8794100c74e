"""How commands reach a daemon, and what they say where they do not: one line, no traceback, exit status 1."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import grpc
import pytest

from tests.operator.scene import control_of, run, told
from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons
from tests.server import certified
from tests.server.control.scene import served
from tokenlake.errors import ProtocolRefused
from tokenlake.wire import engine
from tokenlake_client import MatchOptions
from tokenlake_operator import explain as explaining
from tokenlake_operator.doctor.command import doctor
from tokenlake_operator.events import events
from tokenlake_operator.evict import evict
from tokenlake_operator.explain import explain
from tokenlake_operator.members import drain, remove
from tokenlake_operator.status import status
from tokenlake_operator.top import top
from tokenlake_proto.v1 import admin_pb2
from tokenlake_server.ca import issue
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

COMMANDS: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "status": (status, ()),
    "top": (top, ("--once",)),
    "events": (events, ()),
    "evict": (evict, ("--all", "--yes")),
    "drain": (drain, ()),
    "remove": (remove, ("x",)),
    "explain": (explain, ("x", "--tenant", "default")),
}
each_command = pytest.mark.parametrize("name", COMMANDS)


def refused(name: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """The one line that a command prints before it ends with status 1."""
    command, own = COMMANDS[name]
    result = run(command, *own, *arguments, env=env)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.fixture(scope="module")
def remote() -> Iterator[tuple[Cluster, dict[str, str], Path]]:
    """Two nodes with a control plane for other machines: the cluster, the addresses, the directory of the CA."""
    cluster = Cluster(2, "4MiB", "1MiB")
    addresses = served(cluster)
    ca = cluster.directory / "ca"
    issue(ca, "alice", role="admin")
    issue(ca, "bob", role="reader")
    with cluster:
        yield cluster, addresses, ca


def files(ca: Path, name: str, trusted: Path | None = None) -> list[object]:
    certificate, key = ca / f"{name}.pem", ca / f"{name}-key.pem"
    return ["--certificate", certificate, "--key", key, "--ca", trusted or ca / "ca.pem"]


# -- no daemon


@each_command
def test_no_daemon(name: str, tmp_path: Path) -> None:
    assert "no daemon with a control plane at" in refused(name, "--socket", tmp_path / "nothing.control")


def test_a_path_at_which_no_daemon_listens(tmp_path: Path) -> None:
    path = tmp_path / "a.control"
    path.write_text("")
    assert "is no socket" in refused("status", "--socket", path)
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        if not os.geteuid():
            sock.listen()
            os.chown(path, 65534, 65534)
            assert "belongs to uid 65534" in refused("status", "--socket", path)
            os.chown(path, 0, 0)
    assert "the one that made it has ended" in refused("status", "--socket", path)


ENGINE = """
import os, sys
from tests.robustness.live import LAYOUT
from tokenlake.errors import Unreachable
from tokenlake_client import Pool
if len(sys.argv) > 2:
    os.setegid(65534), os.seteuid(65534)
try:
    Pool.connect(sys.argv[1], LAYOUT, daemon_uid=0)
except Unreachable as error:
    print(error)
"""


def of_engine(*arguments: object) -> str:
    """The error with which an engine does not connect."""
    command = [sys.executable, "-c", ENGINE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_an_engine_that_may_not_use_the_socket() -> None:
    directory = Path(tempfile.mkdtemp(prefix="tokenlake-"))
    directory.chmod(0o755)
    path = directory / "n.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()
        path.chmod(0o660)
        assert of_engine(path, 65534) == (
            f"this user, uid 65534, may not connect to {path}, which belongs to root:root with mode 0660. Run "
            "this program as that user, or run the daemon as a service of a group that this user is in, and add uid "
            "65534 to 'allow_uids'"
        )
        directory.chmod(0o700)
        assert "a directory on the way to it is closed to this user" in of_engine(path, 65534)
    shutil.rmtree(directory)


def test_an_engine_without_a_socket(tmp_path: Path) -> None:
    text = of_engine(tmp_path / "nothing.sock")
    assert text.startswith(f"no daemon listens at {tmp_path}/nothing.sock (No such file or directory); start one")
    file = tmp_path / "file.sock"
    file.touch()
    assert of_engine(file) == f"{file} is no socket"


@pytest.mark.parametrize("kind", ["ConfigurationError", "annotations", "Nothing"])
def test_explain_is_refused_for_a_reason_of_another_version(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "dial", lambda *_: (contextlib.nullcontext(Mock()), Path("x.sock")))
    monkeypatch.setattr(explaining, "read_frame", lambda *_: b"")
    monkeypatch.setattr(explaining, "decode", lambda *_: engine.Failed(1, kind, "the reason"))
    with pytest.raises(ProtocolRefused, match="the reason"):
        explaining.ask(Path("x.sock"), "x")


# -- daemons that do not answer as they should


@pytest.mark.parametrize("name", ["status", "top", "evict", "drain"])
def test_a_stopped_daemon(name: str, monkeypatch: pytest.MonkeyPatch, remote: tuple[Cluster, Any, Path]) -> None:
    monkeypatch.setattr("tokenlake_operator.reaching.CALL_S", 0.5)
    node = remote[0].nodes[0]
    node.freeze()
    try:
        assert "did not answer within" in refused(name, "--socket", control_of(node))
    finally:
        node.thaw()


class Other(grpc.GenericRpcHandler):
    """A daemon of a version that has two methods."""

    def service(self, handler_call_details: Any) -> Any:
        answers = {
            "GetStatus": admin_pb2.GetStatusResponse(
                node="old", version="0.0.1", membership=admin_pb2.Membership(source="peers", known=True)
            ),
            "GetCluster": admin_pb2.GetClusterResponse(members=[admin_pb2.Member(node="old", usable=True)]),
        }
        answer = answers.get(handler_call_details.method.rpartition("/")[2])
        if answer is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda body, context: answer.SerializeToString())


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "old.control"
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Other()])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    server.stop(None).wait()


@pytest.mark.parametrize("name", ["evict", "drain", "remove", "events"])
def test_a_daemon_of_another_version(name: str, old: Path) -> None:
    assert "the daemon is of another version" in refused(name, "--socket", old)


def test_the_doctor_of_a_daemon_of_another_version(old: Path) -> None:
    report = told(doctor, "--socket", old)
    assert report["findings"] == []
    assert any("old is of version 0.0.1" in each for each in report["not_checked"])
    assert told(status, "--socket", old)["nodes"]["old"]["version"] == "0.0.1"


# -- other machines


def test_a_daemon_of_another_machine(remote: tuple[Cluster, dict[str, str], Path]) -> None:
    _, addresses, ca = remote
    for node in (addresses["node1"], f"node1={addresses['node1']}"):
        answer = told(status, "--node", node, *files(ca, "alice"))
        assert sorted(answer["nodes"]) == ["node0", "node1"]
        assert answer["findings"] == []
    environ = {"TOKENLAKE_OPERATOR_NODE": addresses["node0"]}
    for setting, file in (("CERTIFICATE", "alice.pem"), ("KEY", "alice-key.pem"), ("CA", "ca.pem")):
        environ[f"TOKENLAKE_OPERATOR_{setting}"] = str(ca / file)
    assert sorted(told(status, env=environ)["nodes"]) == ["node0", "node1"]


@pytest.mark.parametrize("name", ["evict", "drain", "remove"])
def test_a_certificate_without_the_role(name: str, remote: tuple[Cluster, dict[str, str], Path]) -> None:
    _, addresses, ca = remote
    line = refused(name, "--node", addresses["node0"], *files(ca, "bob"))
    assert "needs the role admin, which 'bob' does not have" in line
    assert "needs the role admin" not in run(status, "--node", addresses["node0"], *files(ca, "bob")).output


def test_certificates_that_are_refused(tmp_path: Path, remote: tuple[Cluster, dict[str, str], Path]) -> None:
    _, addresses, ca = remote
    address = addresses["node0"]
    assert "asks for a certificate with a role" in refused("status", "--node", address)
    assert "the certificate is for spiffe" in refused("status", "--node", address, *files(ca, "node1"))
    other = certified.authority(tmp_path / "other")
    issue(other, "mallory", role="admin")
    foreign = refused("status", "--node", address, *files(other, "mallory", ca / "ca.pem"))
    assert "refuses this certificate" in foreign
    untrusted = refused("status", "--node", address, *files(ca, "alice", other / "ca.pem"))
    assert "refused by this side" in untrusted
    named = refused("status", "--node", f"node1={address}", *files(ca, "alice"))
    assert "is not one of node 'node1', but that of node 'node0'" in named
    assert "--ca" in refused("status", "--node", address, *files(ca, "alice", tmp_path / "none.pem"))
    shutil.copy(ca / "alice.pem", tmp_path / "mixed.pem")
    shutil.copy(ca / "bob-key.pem", tmp_path / "mixed-key.pem")
    assert "--certificate" in refused("status", "--node", address, *files(tmp_path, "mixed", ca / "ca.pem"))


def test_addresses_where_no_daemon_is(remote: tuple[Cluster, dict[str, str], Path]) -> None:
    ca = remote[2]
    line = refused("status", "--node", f"127.0.0.1:{reserve_port()}", *files(ca, "alice"))
    assert "is this the setting 'control' of a daemon that runs?" in line
    assert "NAME=HOST:PORT" in refused("status", "--node", "no:port:here", *files(ca, "alice"))
    for command, own in ((explain, ("x",)), (doctor, ())):
        result = run(command, *own, "--node", "no:port:here")
        assert (result.exit_code, "NAME=HOST:PORT" in result.stderr) == (1, True)
    result = run(status, "--certificate", ca / "alice.pem")
    assert (result.exit_code, "belong together" in result.stderr) == (2, True)


def test_an_address_that_is_not_the_control_plane(remote: tuple[Cluster, dict[str, str], Path]) -> None:
    cluster, _, ca = remote
    port = cluster.ports["node0"]
    for address in (f"127.0.0.1:{port}", f"node0=127.0.0.1:{port}", f"127.0.0.1:{cluster.nodes[0].metrics_port}"):
        line = refused("status", "--node", address, *files(ca, "alice"))
        assert f"{address.rpartition('=')[2]} is not the control plane of a daemon: --node takes the address" in line


def test_one_socket_in_place_of_the_other(remote: tuple[Cluster, dict[str, str], Path]) -> None:
    node = remote[0].nodes[0]
    line = refused("status", "--socket", node.socket)
    expected = f"is the socket of engines; this command takes the control socket, by default {control_of(node)}"
    assert line == f"Error: {node.socket} {expected}"
    other = run(explain, "x", "--socket", control_of(node))
    assert f"is the control socket; this command takes the socket of engines, by default {node.socket}" in other.stderr
    assert "Path of the socket of engines; with --tenant" in run(explain, "--help").stdout
    assert "Path of the control socket." in run(status, "--help").stdout


# -- the daemons of this machine


def test_the_only_daemon_is_found_and_of_several_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)

    def places(environ: object, node: str, uid: int) -> tuple[str, ...]:
        return (str(runtime / f"tokenlake-{node}.sock"),)

    monkeypatch.setattr("tokenlake_operator.reaching.sockets_to_try", places)
    cluster = Cluster(2, "4MiB", "1MiB")
    for node in cluster.nodes:
        node.socket = runtime / f"tokenlake-{node.name}.sock"
        node.settings["socket"] = str(node.socket)
    cluster.deadlines = PATIENT
    with cluster:
        line = refused("status")
        assert line == "Error: several daemons run here: name one with --node (node0, node1)"
        several = run(explain, "--last", "1")
        assert (several.exit_code, several.stderr.strip()) == (1, line)
        with cluster.connect(1, LAYOUT) as pool:
            pool.match(pool.prefix(Prompt(1, 1).tokens).keys, MatchOptions(request="asked")).release()
        assert told(explain, "asked", "--node", "node1")["node"] == "node1"
        answer = told(status, "--node", "node1")
        assert sorted(answer["nodes"]) == ["node0", "node1"]
        assert "there are daemons here with --node node0" in refused("status", "--node", "node2")
        # The socket of a daemon that was killed stays, and is no daemon.
        cluster.nodes[0].kill()
        assert list(told(status)["nodes"]) == ["node1"]
        assert told(explain, "--last", "1")["request"] == "asked"
        assert "has ended" in refused("status", "--node", "node0")


def test_the_socket_of_a_configuration_file(tmp_path: Path) -> None:
    with daemons(1) as cluster:
        file = tmp_path / "n.toml"
        file.write_text(f'node = "node0"\nsocket = "{cluster.nodes[0].socket}"\n')
        assert list(told(status, "--config", file)["nodes"]) == ["node0"]
        file.write_text('memroy = "1GiB"\n')
        assert "did you mean 'memory'" in refused("status", "--config", file)
