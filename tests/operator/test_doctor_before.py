"""`tokenlake doctor` before the start: each planted misconfiguration is found and its cure is named."""

from __future__ import annotations

import datetime
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_files import kernel_files
from tests.operator.scene import GivenNode, checks, run
from tokenlake_operator.doctor.command import doctor
from tokenlake_operator.doctor.machine import Machine
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.ports import reserve_port

pytest.importorskip("grpc")

Plant = Callable[[GivenNode, pytest.MonkeyPatch], object]
PLANTS: list[tuple[str, str, Plant]] = []
"""(check, a part of the cure, the act that plants the misconfiguration)."""
SECRET = "ab" * 32


def plant(check: str, cure: str) -> Callable[[Plant], Plant]:
    def add(act: Plant) -> Plant:
        PLANTS.append((check, cure, act))
        return act

    return add


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GivenNode]:
    yield GivenNode(tmp_path)
    while kept:
        kept.pop().close()


kept: list[socket.socket] = []
"""Sockets that a plant leaves open for the time of a test."""


def listening(family: socket.AddressFamily, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)  # type: ignore[arg-type]
    sock.listen(1)
    kept.append(sock)
    return sock


def certified(
    node: GivenNode, *, ca_days: float = 3650, name: str = "n1", cluster: str = "tokenlake", **given: object
) -> Path:
    """Give the node a certificate, and return the directory of its CA."""
    ca = node.directory / "ca"
    init_ca(ca, cluster, ca_days)
    certificate, key = issue(ca, name, **given)  # type: ignore[arg-type]
    node.settings |= {"certificate": str(certificate), "key": str(key), "ca": str(ca / "ca.pem")}
    return ca


def tenants(*entries: str) -> str:
    return "\n".join(f"[[tenants]]\nsecret = '{SECRET[: 64 - at * 2]}'\n{entry}" for at, entry in enumerate(entries))


# -- settings


@plant("settings-file", "chmod 600")
def secrets_that_others_read(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["cluster_secret"] = SECRET
    node.mode = 0o644


@plant("settings", "did you mean 'memory'")
def misspelt_setting(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["memroy"] = "1GiB"


@plant("settings", "did you mean 'memory'")
def misspelt_variable(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TOKENLAKE_MEMROY", "1GiB")


@plant("settings", "loopback address")
def unencrypted_by_accident(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["listen"] = "0.0.0.0:7440"


@plant("quotas", "at most 1")
def quotas_beyond_memory(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["allow_uids"] = [5001]
    node.more = tenants("name = 'red'\nquota = 0.7\nuids = [5001]", "name = 'blue'\nquota = 0.6\nuids = [5002]")


@plant("quota-small", "region_size")
def quota_below_a_region(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.more = tenants("name = 'red'\nquota = 0.01\nuids = [5001]")


@plant("regions", "region_size")
def fewer_regions_than_tenants(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings |= {"memory": "1MiB", "allow_uids": [5001]}
    node.more = tenants("name = 'red'\nuids = [5001]", "name = 'blue'\nuids = [5002]")


@plant("tenants-uid", "allow_uids")
def engines_as_the_daemons_user(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["allow_uids"] = [os.geteuid()]
    node.more = tenants("name = 'red'\nuids = [5001]", "name = 'blue'\nuids = [5002]")


@plant("tenants-uid", "allow_uids")
def engines_as_the_daemons_user_by_default(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.more = tenants("name = 'red'\nuids = [5001]", "name = 'blue'\nuids = [5002]")


@plant("metrics-open", "127.0.0.1")
def tenants_shown_to_the_world(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings |= {"metrics": f"0.0.0.0:{reserve_port()}", "metrics_tenants": True}


@plant("unencrypted", "tokenlake ca issue")
def bytes_in_the_clear(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["unencrypted_beyond_loopback"] = True


@plant("kv-events-open", "a Unix socket is the default")
def prompts_shown_to_the_world(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.more = f"[[kv_events]]\nmodel = 'm'\nendpoint = '0.0.0.0:{reserve_port()}'\nbeyond_loopback = true"


@plant("advertise-loopback", "unset it where that is 'listen'")
def advertised_at_loopback(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    node.settings |= {"listen": f"0.0.0.0:{reserve_port()}", "advertise": "127.0.0.1:7440"}


@plant("listen-loopback", "out of the line with 127.0.1.1 in /etc/hosts")
def a_name_of_this_machine_alone(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    """As Debian's installer writes it."""
    certified(node)
    port = reserve_port()
    node.settings |= {"listen": f"gpu-1.example:{port}"}
    resolve = socket.getaddrinfo

    def hosts(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.1.1" if host == "gpu-1.example" else host, *rest, **more)

    patch.setattr(socket, "getaddrinfo", hosts)


# -- the machine


@plant("memory", "give the machine or its cgroup more memory")
def memory_beyond_the_machine(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["memory"] = "512TiB"


@plant("memory", "to at most 36MiB")
def memory_beyond_the_cgroup(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["memory"] = "64MiB"
    node.machine = in_a_pod(node, {"memory.max": 256 << 20, "memory.current": 20 << 20})


@plant("limit-threads", "TasksMax")
def few_threads(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.machine = in_a_pod(node, {"pids.max": 100, "pids.current": 20})


@plant("huge-pages", "raise the limit of the container")
def huge_pages_beyond_the_cgroup(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings |= {"huge_pages": True, "region_size": "64MiB", "memory": "4GiB"}
    node.machine = in_a_pod(node, {"hugetlb.2MB.max": 64 << 20, "hugetlb.2MB.current": 0})


def in_a_pod(node: GivenNode, files: dict[str, int]) -> Machine:
    return Machine(proc=kernel_files(node.directory, 2, "/", files))


@plant("huge-pages", "sysctl vm.nr_hugepages=2112")
def no_huge_pages(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings |= {"huge_pages": True, "region_size": "64MiB", "memory": "4GiB"}


class OldKernel(Machine):
    def __init__(self, lacking: str) -> None:
        super().__init__()
        setattr(self, lacking, lambda: False)


@plant("kernel-memfd", "3.17")
def without_memfd(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.machine = OldKernel("has_sealed_memory")


@plant("kernel-populate", "5.14")
def without_populate(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.machine = OldKernel("has_populate")


@plant("kernel-pidfd", "6.5")
def without_pidfds(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.machine = OldKernel("has_pidfds")


# -- ports, sockets, directories


@plant("address", "give each daemon of a machine its own")
def port_in_use(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["listen"] = "127.0.0.1:{}".format(listening(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1])


@plant("address", "end the process that has the port")
def metrics_port_in_use(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["metrics"] = "127.0.0.1:{}".format(listening(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1])


@plant("address", "`ip address` shows")
def address_of_another_machine(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    node.settings["listen"] = "192.0.2.1:7440"


@plant("socket", "without a socket of another user")
def socket_of_another_user(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("another user's socket needs root")
    listening(socket.AF_UNIX, str(node.settings["socket"])).close()
    os.chown(str(node.settings["socket"]), 65534, 65534)


@plant("socket", "where no file or symbolic link lies")
def file_in_place_of_the_socket(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    Path(str(node.settings["socket"])).write_text("")


@plant("socket", "chmod go-w")
def replaceable_socket(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    (node.directory / "open" / "in").mkdir(parents=True)
    (node.directory / "open").chmod(0o777)
    node.settings["socket"] = str(node.directory / "open" / "in" / "n1.sock")


@plant("socket-shared", "of one pod")
def socket_in_a_directory_of_all(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    (node.directory / "open").mkdir()
    (node.directory / "open").chmod(0o2777)
    node.settings["socket"] = str(node.directory / "open" / "n1.sock")


@plant("socket", "that can be created")
def socket_without_a_directory(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["socket"] = str(node.directory / "none" / "n1.sock")


@plant("state-directory", "install -d")
def state_directory_missing(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["state_directory"] = str(node.directory / "none")


@plant("state-directory", "chown")
def state_directory_read_only(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    # Also for root, which modes do not stop.
    node.settings["state_directory"] = "/proc"


@plant("disk", "mount the device")
def disk_missing(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["disk"] = str(node.directory / "none")


@plant("disk", "chown")
def disk_read_only(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["disk"] = "/proc"


@plant("disk-size", "a lower size")
def disk_too_small(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["disk"] = f"{node.directory}:900TiB"


# -- certificates


@plant("certificate-expired", "--renew")
def expired_certificate(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    certified(node, begin=begin, days=10)


@plant("certificate-early", "timedatectl")
def certificate_of_tomorrow(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, begin=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1))


@plant("certificate-expires", "--renew")
def certificate_that_ends_soon(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, days=6)


@plant("ca-expires", "a new CA")
def ca_that_ends_soon(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, ca_days=5)


@plant("certificate-ca", "if the CA that issued it belongs to this cluster")
def certificate_of_another_ca(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    init_ca(node.directory / "other", "tokenlake")
    node.settings["ca"] = str(node.directory / "other" / "ca.pem")


@plant("certificate-name", "correct 'node'")
def certificate_of_another_node(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, name="n2")


@plant("certificate-name", "'cluster'")
def certificate_of_another_cluster(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, cluster="other")


@plant("certificate-usage", "tokenlake ca issue n1")
def certificate_of_an_operator(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node, role="admin")


@plant("certificate-file", "can be read")
def no_certificate_file(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    node.settings["ca"] = str(node.directory / "none.pem")


@plant("key", "chmod 600")
def key_that_others_read(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    Path(str(node.settings["key"])).chmod(0o644)


@plant("key", "of the same issue")
def key_of_another_certificate(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    ca = certified(node)
    node.settings["key"] = str(issue(ca, "n2")[1])


# -- the members


@plant("etcd-open", "etcd_password")
def etcd_without_a_user(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    node.settings["etcd"] = ["192.0.2.1:2379"]
    patch.setattr("tokenlake_operator.doctor.command.check_membership", lambda config, running: ())


@plant("etcd", "endpoint health")
def etcd_that_does_not_answer(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tokenlake_operator.doctor.membership.ETCD_S", 0.2)
    node.settings["etcd"] = [f"127.0.0.1:{reserve_port()}"]


@plant("peer-name", "DNS")
def peer_without_an_address(node: GivenNode, patch: pytest.MonkeyPatch) -> None:
    certified(node)
    node.settings["peers"] = ["n2=no-such-host.invalid:7440"]


@pytest.mark.parametrize(("check", "cure", "act"), PLANTS, ids=[each[2].__name__ for each in PLANTS])
def test_a_planted_misconfiguration_is_found(
    check: str, cure: str, act: Plant, node: GivenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    node.more = tenants("name = 'red'\nuids = [5001]", "name = 'blue'\nuids = [5002]\nquota = 0.5")
    assert node.examine()["findings"] == []


def test_the_exit_status_and_the_lines(node: GivenNode) -> None:
    sound = run(doctor, "--config", node.write())
    text = "The settings and this machine have no problem; the daemon does not run."
    assert (sound.exit_code, text in sound.stdout) == (0, True), sound.output
    socket_without_a_directory(node, pytest.MonkeyPatch())
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
    """Without a daemon and a file, the settings of a node are not checked."""
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
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 1000
