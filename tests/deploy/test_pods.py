"""The pods of the chart with real daemons, in namespaces: users, mounts, secrets, certificates, limits, their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import Object, daemon_of, objects, pods
from tests.deploy.pods import COMMAND, Pod, missing, secret_volume
from tests.robustness.live import wait_until
from tests.server.test_memory_limit import MemoryGroup
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.children import start_child
from tokenlake_testing.etcd import etcd_version
from tokenlake_testing.network import Network

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-chart")

pytestmark = [pytest.mark.live, pytest.mark.rest, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

USER = 10001
SMALL: dict[str, Any] = {
    "memory": "64MiB",
    "smallestSegment": "16KiB",
    "settings": {"match_deadline_ms": 2000, "region_size": "1MiB"},
}
SIDECAR = SMALL | {"mode": "sidecar", "engine": {"enabled": True, "model": "m/x", "replicas": 2}}
NODES = ("tokenlake-engine-0", "tokenlake-engine-1")
TENANT = f"[[tenants]]\nname = 'red'\nsecret = '{'ab' * 32}'\ntokens = ['{'cd' * 16}']\n"
END = "tokenlake_certificate_end_seconds "
TOKEN = "cd" * 16


def certificates(directory: Path, *nodes: str) -> dict[str, str]:
    """The files of the Secrets that cert-manager makes, as the chart mounts them."""
    if not (directory / "ca.pem").exists():
        init_ca(directory, "tokenlake")
    found: dict[str, str] = {}
    for node in nodes:
        certificate, key = issue(directory, node, renew=(directory / f"{node}.pem").exists())
        parts = {"tls.crt": certificate, "tls.key": key, "ca.crt": directory / "ca.pem"}
        found |= {f"{node}/{name}": file.read_text() for name, file in parts.items()}
    return found


def served(pod: Pod, container: Object, log: Path) -> None:
    """Start the daemon of a pod, and wait until it serves."""
    arguments = [word for word in container["args"] if word]
    pod.start(container, [*COMMAND, *arguments], log)

    def answers() -> bool:
        assert pod.running(container["name"]), log.read_text()
        return pod.page("/health")[0] == 200

    wait_until(answers, "the page /health answers")


def ready(*pods: Pod) -> None:
    def all_are() -> bool:
        return all(pod.page("/ready")[0] == 200 for pod in pods)

    wait_until(all_are, f"all are ready: {[pod.page('/ready') for pod in pods]}")


def peers(pod: Pod) -> int:
    found: int = json.loads(pod.page("/health")[1])["tokenlake_peers_connected"]
    return found


def socket_of_vllm() -> str:
    """The path that the chart gives to vLLM."""
    (container,) = [each for _, pod in pods(objects(SIDECAR)) for each in pod["containers"]]
    (flag,) = [each for each in container["args"] if each.startswith("--kv-transfer-config=")]
    path: str = json.loads(flag.partition("=")[2])["kv_connector_extra_config"]["socket"]
    return path


def engine(pod: Pod, like: Object, name: str, log: Path, *words: str, socket: str | None = None) -> str:
    """What an engine prints that runs in a container of its own in the pod: the user of the pod, and its socket, at the
    path that it is given, by default that of the chart."""
    container = {
        "name": name,
        "env": [],
        "securityContext": like["securityContext"],
        "volumeMounts": [mount for mount in like["volumeMounts"] if mount["name"] == "socket"],
    }
    path = socket_of_vllm() if socket is None else socket
    log.unlink(missing_ok=True)
    pod.start(container, [sys.executable, "-m", "tests.deploy.engine", path, *words], log)
    assert pod.wait(name) == 0, log.read_text()
    return log.read_text().strip()


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[tuple[list[Pod], Object, Path]]:
    """Two pods of the StatefulSet, whose daemons are ready; the container; a directory."""
    tmp_path.chmod(0o755)
    spec, container = daemon_of(objects(SIDECAR | {"configSecret": "s"}))
    secrets = {"config": {"tokenlake.toml": TENANT}, "certificates": certificates(tmp_path / "ca", *NODES)}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(NODES))
        hosts = "".join(f"{network.address(node)} {node}.tokenlake.tokenlake.svc\n" for node in NODES)
        made = []
        for node in NODES:
            pod = Pod(spec, node, network, tmp_path / node, hosts=hosts, secrets=secrets)
            made.append(stack.enter_context(pod))
            served(pod, container, tmp_path / f"{node}.log")
        ready(*made)
        wait_until(lambda: all(peers(pod) == 1 for pod in made), "the daemons are connected")
        yield made, container, tmp_path


def test_sidecars_share_their_caches(sidecars: tuple[list[Pod], Object, Path]) -> None:
    """With the members of the template, certificates and tenants from Secrets, as a user that no file names, on a
    read-only file system, without a home directory and without rights."""
    (first, second), container, directory = sidecars
    assert engine(first, container, "writer", directory / "engine.log", "store", "1", "8", TOKEN) == "8"
    assert engine(second, container, "reader", directory / "engine.log", "read", "1", "8", TOKEN) == "8"
    status = Path(f"/proc/{first.pid('tokenlake')}/status").read_text()
    fields = {name: text.split() for name, _, text in (line.partition(":") for line in status.splitlines())}
    assert fields["Uid"] == [str(USER)] * 4
    assert fields["NoNewPrivs"] == ["1"]
    assert {fields[name][0] for name in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
    assert fields["NSpid"][-1] == "1"
    mounts = Path(f"/proc/{first.pid('tokenlake')}/mountinfo").read_text().splitlines()
    (root,) = [line for line in mounts if line.split()[4] == "/"]
    assert root.split()[5].startswith("ro")
    assert "other users can write the directory" in (directory / f"{NODES[0]}.log").read_text()
    shown = first.run_in(container, [*COMMAND, "status", "--json"])
    assert set(json.loads(shown.stdout)["nodes"]) >= {NODES[0]}, shown
    for pod in (first, second):
        os.kill(pod.pid("tokenlake"), signal.SIGTERM)
        assert pod.wait("tokenlake") == 0


def test_certificates_are_renewed_in_their_volume(sidecars: tuple[list[Pod], Object, Path]) -> None:
    (first, second), container, directory = sidecars

    def valid_until(pod: Pod) -> str:
        (line,) = [line for line in pod.page("/metrics")[1].splitlines() if line.startswith(END)]
        return line

    before = valid_until(first)
    for pod in (first, second):
        secret_volume(pod.volumes["certificates"], certificates(directory / "ca", *NODES), USER)
    wait_until(lambda: valid_until(first) != before, "the daemon has the new certificate")
    # A daemon that starts with the new one is let in.
    os.kill(second.pid("tokenlake"), signal.SIGTERM)
    assert second.wait("tokenlake") == 0
    served(second, container, directory / "again.log")
    wait_until(lambda: peers(first) == peers(second) == 1, "the daemons are connected again")


@pytest.mark.parametrize(
    ("secret", "group", "mode", "refused"),
    [
        (TENANT, USER, 0o640, ""),
        (TENANT, USER, 0o444, "with mode 0444 other users can read"),
        (TENANT, 4321, 0o440, "tokenlake.toml' is not readable"),
    ],
    ids=["fsGroup", "readable for all", "another group"],
)
def test_the_file_of_a_secret(secret: str, group: int, mode: int, refused: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    spec, container = daemon_of(objects(SIDECAR | {"configSecret": "s", "engine": SIDECAR["engine"] | {"replicas": 1}}))
    with Network(NODES[:1]) as network:
        files = {"config": {"tokenlake.toml": secret}}
        with Pod(spec, NODES[0], network, tmp_path / "pod", secrets=files) as pod:
            secret_volume(pod.volumes["config"], files["config"], group, mode)
            log = tmp_path / "log"
            if not refused:
                served(pod, container, log)
                return
            pod.start(container, [*COMMAND, *container["args"]], log)
            assert pod.wait("tokenlake") in (1, 2)
            assert refused in log.read_text()


def test_temporary_files_beside_those_of_others(tmp_path: Path) -> None:
    """Without a sticky bit, others could take the control socket away: the daemon serves without it."""
    tmp_path.chmod(0o755)
    spec, container = daemon_of(objects(SIDECAR | {"engine": SIDECAR["engine"] | {"replicas": 1}}))
    volumes = [
        volume if volume["name"] != "temporary" else {"name": "temporary", "emptyDir": {}} for volume in spec["volumes"]
    ]
    with Network(NODES[:1]) as network, Pod(spec | {"volumes": volumes}, NODES[0], network, tmp_path / "pod") as pod:
        served(pod, container, tmp_path / "log")
        assert "this node has no control plane" in (tmp_path / "log").read_text()
        assert engine(pod, container, "writer", tmp_path / "engine.log", "store", "1", "4") == "4"


def test_a_directory_of_the_machine(tmp_path: Path) -> None:
    """kubelet makes it for root; the init container, whose one right is to give files away, gives it to the daemon; an
    engine of another user in another pod trusts the daemon there."""
    tmp_path.chmod(0o755)
    values = SMALL | {"settings": SMALL["settings"] | {"allow_uids": [USER, 20002]}}
    spec, container = daemon_of(objects(values))
    machine = tmp_path / "machine"
    with Network(["gpu-1"]) as network, Pod(spec, "gpu-1", network, tmp_path / "pod", machine=machine) as pod:
        (first,) = spec["initContainers"]
        log = tmp_path / "log"
        pod.start(container, [*COMMAND, *container["args"]], log)
        assert pod.wait("tokenlake") == 1
        assert "/run/tokenlake" in log.read_text()
        pod.start(first, first["command"], log)
        assert pod.wait(first["name"]) == 0, log.read_text()
        served(pod, container, log)
        ready(pod)
        shown = pod.run_in(container, [*COMMAND, "status", "--json"])
        assert set(json.loads(shown.stdout)["nodes"]) == {"gpu-1"}, shown
        foreign = {
            "securityContext": {"runAsUser": 20002, "runAsGroup": USER, "fsGroup": USER},
            "volumes": [volume for volume in spec["volumes"] if volume["name"] == "socket"],
        }
        with Pod(foreign, "gpu-1", network, tmp_path / "other", machine=machine) as other:
            assert engine(other, container, "writer", tmp_path / "engine.log", "store", "1", "4", socket="") == "4"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[list[Pod], Object, Path]]:
    """The pods of the DaemonSet on two machines, whose members are in etcd; the container; a directory."""
    tmp_path.chmod(0o755)
    names = ("gpu-1", "gpu-2")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network([*names, "etcd"]))
        address = network.address("etcd")
        flags = {
            "data-dir": str(tmp_path / "etcd"),
            "listen-client-urls": "http://0.0.0.0:2379",
            "advertise-client-urls": f"http://{address}:2379",
        }
        words = ["etcd", *(word for name, value in flags.items() for word in (f"--{name}", value))]
        with (tmp_path / "etcd.log").open("wb") as output:
            inside = ["ip", "netns", "exec", network.namespace("etcd")]
            etcd = start_child([*inside, *words], stdout=output, stderr=output)
        stack.callback(etcd.wait)
        stack.callback(etcd.kill)
        values: Mapping[str, Any] = SMALL | {
            "etcd": {"endpoints": [f"{address}:2379"]},
            "certificates": {"nodes": list(names)},
            "drainSeconds": 20,
        }
        spec, container = daemon_of(objects(values))
        files = {"certificates": certificates(tmp_path / "ca", *names)}
        made = []
        for name in names:
            pod = Pod(spec, name, network, tmp_path / name, secrets=files, machine=tmp_path / f"machine-{name}")
            os.chown(pod.volumes["socket"], USER, USER)
            made.append(stack.enter_context(pod))
            served(pod, container, tmp_path / f"{name}.log")
        ready(*made)
        wait_until(lambda: all(peers(pod) == 1 for pod in made), "the daemons are connected")
        yield made, container, tmp_path


@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
@pytest.mark.parametrize("by", ["SIGTERM", "a hook"])
def test_a_pod_that_ends(by: str, machines: tuple[list[Pod], Object, Path]) -> None:
    """It hands its segments over and leaves the ring within the time that the pod has; its successor is a member again.
    kubelet runs a hook `preStop` in the container, with which it may end."""
    (first, second), container, directory = machines
    assert engine(first, container, "writer", directory / "engine.log", "store", "1", "16") == "16"
    if by == "SIGTERM":
        os.kill(first.pid("tokenlake"), signal.SIGTERM)
    else:
        ended = first.run_in(container, [*COMMAND, "drain"])
        assert ended.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), ended
    assert first.wait("tokenlake", first.grace_s) == 0
    assert engine(second, container, "reader", directory / "engine.log", "read", "1", "16") == "16"
    wait_until(lambda: peers(second) == 0, "it is no member any more")
    served(first, container, directory / "again.log")
    ready(first, second)
    wait_until(lambda: peers(second) == 1, "its successor is a member")


def test_the_limit_of_a_pod_is_enough_for_it_and_for_commands(tmp_path: Path) -> None:
    """In a cgroup with the limit of the template; the daemon, and the commands of an operator beside it."""
    tmp_path.chmod(0o755)
    spec, container = daemon_of(objects(SIDECAR | {"engine": SIDECAR["engine"] | {"replicas": 1}}))
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    try:
        group = MemoryGroup(limit)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with contextlib.closing(group), Network(NODES[:1]) as network, Pod(spec, NODES[0], network, tmp_path / "p") as pod:
        with group.entered():
            served(pod, container, tmp_path / "log")
        ready(pod)
        assert engine(pod, container, "writer", tmp_path / "engine.log", "store", "1", "16") == "16"
        alone = group.used
        assert alone + (100 << 20) < limit
        with group.entered():
            assert pod.run_in(container, [*COMMAND, "status"]).returncode == 0
            assert pod.run_in(container, [*COMMAND, "doctor", "--no-measure"]).returncode in (0, 1)
        assert pod.running("tokenlake")
        os.kill(pod.pid("tokenlake"), signal.SIGTERM)
        assert pod.wait("tokenlake") == 0
