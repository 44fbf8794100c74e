"""`tokenlake doctor` before the start: each planted misconfiguration is found and its cure is named."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_files import kernel_files
from tests.operator.scene import GivenNode, checks, run
from tokenlake_operator.doctor.command import doctor
from tokenlake_operator.doctor.machine import Machine
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.ports import reserve_port

Plant = Callable[[GivenNode, pytest.MonkeyPatch], object]
SECRET = "ab" * 32
kept: list[socket.socket] = []
"""Sockets that a plant leaves open for the time of a test."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GivenNode]:
    yield GivenNode(tmp_path)
    while kept:
        kept.pop().close()


# -- acts that plant a misconfiguration


def given(*entries: str, mode: int = 0o600, more: str = "", **settings: object) -> Plant:
    """These settings, in a file with this mode. `entries`: lines for tenants; `more`: further lines of the file."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        node.settings |= settings
        node.mode, node.more = mode, more + tenants(*entries)

    return act


def tenants(*entries: str) -> str:
    return "\n".join(f"[[tenants]]\nsecret = '{SECRET[: 64 - at * 2]}'\n{entry}" for at, entry in enumerate(entries))


def below(setting: str, path: str, *made: str, mode: int = 0o777) -> Plant:
    """A setting that is a path below the directory of the node. `made`: directories there, the first with this mode."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        for each in made:
            (node.directory / each).mkdir()
        if made:
            (node.directory / made[0]).chmod(mode)
        node.settings[setting] = f"{node.directory}/{path}"

    return act


def in_a_pod(files: dict[str, int], **settings: object) -> Plant:
    """The node is in a cgroup with these files."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        node.settings |= settings
        node.machine = Machine(proc=kernel_files(node.directory, 2, "/", files))

    return act


def without(*features: str) -> Plant:
    """An old kernel lacks a feature."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        node.machine = Machine()
        for feature in features:
            patch.setattr(node.machine, feature, lambda: False)

    return act


def certified(
    node: GivenNode, *, ca_days: float = 3650, name: str = "n1", cluster: str = "tokenlake", **given: object
) -> Path:
    """Give the node a certificate, and return the directory of its CA."""
    ca = node.directory / "ca"
    init_ca(ca, cluster, ca_days)
    certificate, key = issue(ca, name, **given)  # type: ignore[arg-type]
    node.settings |= {"certificate": str(certificate), "key": str(key), "ca": str(ca / "ca.pem")}
    return ca


def certificate(settings: dict[str, object] | None = None, **of: Any) -> Plant:
    """A certificate with these properties, and further settings."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        certified(node, **of)
        node.settings |= settings or {}

    return act


def begins(after_days: float, **of: Any) -> Plant:
    return certificate(begin=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=after_days), **of)


def listening(family: socket.AddressFamily, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)  # type: ignore[arg-type]
    sock.listen(1)
    kept.append(sock)
    return sock


def in_use(setting: str) -> Plant:
    """Another process listens at the address."""

    def act(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
        node.settings[setting] = f"127.0.0.1:{listening(socket.AF_INET, ('127.0.0.1', 0)).getsockname()[1]}"

    return act


def bucket_out_of_reach(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    if find_spec("obstore") is None:
        pytest.skip("obstore is not installed (make install-dev)")
    node.settings["cold"] = "s3://bucket/prefix"
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ACCESS_KEY_ID": "i", "SECRET_ACCESS_KEY": "k"}.items():
        patch.setenv(f"AWS_{name}", value)


def socket_of_another_user(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("another user's socket needs root")
    listening(socket.AF_UNIX, str(node.settings["socket"])).close()
    os.chown(str(node.settings["socket"]), 65534, 65534)


def file_in_place_of_the_socket(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    Path(str(node.settings["socket"])).write_text("")


def a_name_of_this_machine_alone(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    """As Debian's installer writes it."""
    certified(node)
    node.settings |= {"listen": f"gpu-1.example:{reserve_port()}"}
    resolve = socket.getaddrinfo

    def hosts(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.1.1" if host == "gpu-1.example" else host, *rest, **more)

    patch.setattr(socket, "getaddrinfo", hosts)


def certificate_of_another_ca(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    init_ca(node.directory / "other", "tokenlake")
    node.settings["ca"] = str(node.directory / "other" / "ca.pem")


def key_that_others_read(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    Path(str(node.settings["key"])).chmod(0o644)


def key_of_another_certificate(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["key"] = str(issue(certified(node), "n2")[1])


def etcd_without_a_user(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["etcd"] = ["192.0.2.1:2379"]
    patch.setattr("tokenlake_operator.doctor.command.check_membership", lambda config, running: ())


def etcd_that_does_not_answer(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tokenlake_operator.doctor.membership.ETCD_S", 0.2)
    node.settings["etcd"] = [f"127.0.0.1:{reserve_port()}"]


RED, BLUE = "name = 'red'\nuids = [5001]", "name = 'blue'\nuids = [5002]"
HUGE: dict[str, Any] = {"huge_pages": True, "region_size": "64MiB", "memory": "4GiB"}
PLANTS: dict[str, tuple[str, str, Plant]] = {
    # Settings.
    "secrets that others read": ("settings-file", "chmod 600", given(mode=0o644, cluster_secret=SECRET)),
    "a misspelt setting": ("settings", "did you mean 'memory'", given(memroy="1GiB")),
    "a misspelt variable": (
        "settings",
        "did you mean 'memory'",
        lambda node, patch: patch.setenv("TOKENLAKE_MEMROY", "1GiB"),
    ),
    "unencrypted by accident": ("settings", "loopback address", given(listen="0.0.0.0:7440")),
    "quotas beyond memory": (
        "quotas",
        "at most 1",
        given(f"{RED}\nquota = 0.7", f"{BLUE}\nquota = 0.6", allow_uids=[5001]),
    ),
    "a quota below a region": ("quota-small", "region_size", given(f"{RED}\nquota = 0.01")),
    "fewer regions than tenants": ("regions", "region_size", given(RED, BLUE, memory="1MiB", allow_uids=[5001])),
    "engines as the daemon's user": ("tenants-uid", "allow_uids", given(RED, BLUE, allow_uids=[os.geteuid()])),
    "engines as the daemon's user by default": ("tenants-uid", "allow_uids", given(RED, BLUE)),
    "tenants shown to the world": (
        "metrics-open",
        "127.0.0.1",
        given(metrics=f"0.0.0.0:{reserve_port()}", metrics_tenants=True),
    ),
    "bytes in the clear": ("unencrypted", "tokenlake ca issue", given(unencrypted_beyond_loopback=True)),
    "prompts shown to the world": (
        "kv-events-open",
        "a Unix socket is the default",
        given(more=f"[[kv_events]]\nmodel = 'm'\nendpoint = '0.0.0.0:{reserve_port()}'\nbeyond_loopback = true"),
    ),
    "advertised at loopback": (
        "advertise-loopback",
        "unset it where that is 'listen'",
        certificate({"listen": f"0.0.0.0:{reserve_port()}", "advertise": "127.0.0.1:7440"}),
    ),
    "a name of this machine alone": (
        "listen-loopback",
        "out of the line with 127.0.1.1 in /etc/hosts",
        a_name_of_this_machine_alone,
    ),
    # The machine.
    "memory beyond the machine": ("memory", "give the machine or its cgroup more memory", given(memory="512TiB")),
    "memory beyond the cgroup": (
        "memory",
        "to at most 36MiB",
        in_a_pod({"memory.max": 256 << 20, "memory.current": 20 << 20}, memory="64MiB"),
    ),
    "few threads": ("limit-threads", "TasksMax", in_a_pod({"pids.max": 100, "pids.current": 20})),
    "huge pages beyond the cgroup": (
        "huge-pages",
        "raise the limit of the container",
        in_a_pod({"hugetlb.2MB.max": 64 << 20, "hugetlb.2MB.current": 0}, **HUGE),
    ),
    "no huge pages": ("huge-pages", "sysctl vm.nr_hugepages=2112", given(**HUGE)),
    "no memfd": ("kernel-memfd", "3.17", without("has_sealed_memory")),
    "no populate": ("kernel-populate", "5.14", without("has_populate")),
    "no pidfds": ("kernel-pidfd", "6.5", without("has_pidfds")),
    # Ports, sockets, directories.
    "a port in use": ("address", "give each daemon of a machine its own", in_use("listen")),
    "the port for metrics in use": ("address", "end the process that has the port", in_use("metrics")),
    "an address of another machine": ("address", "`ip address` shows", certificate({"listen": "192.0.2.1:7440"})),
    "a socket of another user": ("socket", "without a socket of another user", socket_of_another_user),
    "a file in place of the socket": ("socket", "where no file or symbolic link lies", file_in_place_of_the_socket),
    "a replaceable socket": ("socket", "chmod go-w", below("socket", "open/in/n1.sock", "open", "open/in")),
    "a socket in a directory of all": (
        "socket-shared",
        "of one pod",
        below("socket", "open/n1.sock", "open", mode=0o2777),
    ),
    "a socket without a directory": ("socket", "that can be created", below("socket", "none/n1.sock")),
    "no state directory": ("state-directory", "install -d", below("state_directory", "none")),
    # Also for root, which modes do not stop.
    "a state directory that is read only": ("state-directory", "chown", given(state_directory="/proc")),
    "no disk": ("disk", "mount the device", below("disk", "none")),
    "a disk that is read only": ("disk", "chown", given(disk="/proc")),
    "a disk that is too small": ("disk-size", "a lower size", below("disk", ":900TiB")),
    "no place for the cold tier": ("cold", "create it", below("cold", "none")),
    "a place for the cold tier that is read only": ("cold", "must be able to write there", given(cold="/proc")),
    "a bucket that is not reached": ("cold", "AWS_ENDPOINT_URL", bucket_out_of_reach),
    "a cold tier without a secret": ("cold-public", "[[tenants]]", below("cold", "cold", "cold")),
    # Certificates.
    "an expired certificate": ("certificate-expired", "--renew", begins(-30, days=10)),
    "a certificate of tomorrow": ("certificate-early", "timedatectl", begins(1)),
    "a certificate that ends soon": ("certificate-expires", "--renew", certificate(days=6)),
    "a CA that ends soon": ("ca-expires", "a new CA", certificate(ca_days=5)),
    "a certificate of another CA": (
        "certificate-ca",
        "if the CA that issued it belongs to this cluster",
        certificate_of_another_ca,
    ),
    "a certificate of another node": ("certificate-name", "correct 'node'", certificate(name="n2")),
    "a certificate of another cluster": ("certificate-name", "'cluster'", certificate(cluster="other")),
    "a certificate of an operator": ("certificate-usage", "tokenlake ca issue n1", certificate(role="admin")),
    "no certificate file": ("certificate-file", "can be read", certificate({"ca": "/none.pem"})),
    "a key that others read": ("key", "chmod 600", key_that_others_read),
    "a key of another certificate": ("key", "of the same issue", key_of_another_certificate),
    # The members.
    "etcd without a user": ("etcd-open", "etcd_password", etcd_without_a_user),
    "etcd that does not answer": ("etcd", "endpoint health", etcd_that_does_not_answer),
    "a peer without an address": ("peer-name", "DNS", certificate({"peers": ["n2=no-such-host.invalid:7440"]})),
}
"""By name: the check, a part of the cure, the act that plants the misconfiguration."""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_misconfiguration_is_found(name: str, node: GivenNode, monkeypatch: pytest.MonkeyPatch) -> None:
    check, cure, act = PLANTS[name]
    act(node, monkeypatch)
    report = node.examine()
    assert report["running"] is False
    found = [each for each in report["findings"] if each["check"] == check]
    assert found, report
    assert any(cure in each["cure"] for each in found), found
    assert SECRET[:16] not in json.dumps(report)


def test_a_sound_node_has_no_finding(node: GivenNode) -> None:
    assert node.examine()["findings"] == []
    certified(node)
    (node.directory / "state").mkdir()
    node.settings |= {
        "control": f"127.0.0.1:{reserve_port()}",
        "state_directory": str(node.directory / "state"),
        "peers": [f"n2=127.0.0.1:{reserve_port()}"],
        "allow_uids": [5001],
    }
    node.more = tenants(RED, f"{BLUE}\nquota = 0.5")
    assert node.examine()["findings"] == []


def test_the_exit_status_and_the_lines(node: GivenNode) -> None:
    sound = run(doctor, "--config", node.write())
    text = "The settings and this machine have no problem; the daemon does not run."
    assert (sound.exit_code, text in sound.stdout) == (0, True), sound.output
    node.settings["socket"] = str(node.directory / "none" / "n1.sock")
    node.write()
    found = run(doctor, "--config", node.file)
    assert found.exit_code == 1
    assert "a path that can be created" in found.stdout
    assert "not checked" in found.stdout
    assert run(doctor, "--config", node.directory / "none.toml").exit_code == 1
    unread = node.directory / "unread.toml"
    unread.write_text("metrcs = 1\n")
    unread.chmod(0o600)
    lines = run(doctor, "--config", unread).stdout
    assert "the settings cannot be read" in lines
    assert "did you mean 'metrics'?" in lines


def test_without_a_daemon_and_a_file() -> None:
    """The settings of a node are not checked."""
    report = json.loads(run(doctor, "--node", "nowhere", "--json").stdout)
    assert any("give --config" in each for each in report["not_checked"])


def test_the_limit_of_open_files(node: GivenNode) -> None:
    limit = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1000, 1000))"
    program = f"{limit}; from tokenlake_operator.doctor.command import doctor; doctor()"
    command = [sys.executable, "-c", program, "--config", str(node.write()), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report = json.loads(found.stdout)
    assert (found.returncode, checks(report)) == (1, ["limit-files"]), found.stderr
    assert "LimitNOFILE=" in report["findings"][0]["cure"]
