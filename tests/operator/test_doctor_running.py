"""`tokenlake doctor` beside daemons that run: what is planted between nodes is found, and nothing where all is well."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.operator.scene import checks, control_of, examined, run
from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, read, store, total, wait_until
from tests.server import certified
from tests.server.control.scene import served
from tests.server.test_bulk_listen import two
from tokenlake_client import Pool
from tokenlake_operator.doctor.command import doctor
from tokenlake_server.ca import issue
from tokenlake_server.peers.states import WARN_S
from tokenlake_testing.cluster import Cluster, Node, node_names
from tokenlake_testing.etcd import EtcdServers, etcd_version
from tokenlake_testing.network import Network, missing
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

FIRST = "m"
"""The node that is examined. Of two nodes, the one whose name sorts first connects."""
TOKEN = "red-token-0123456789"


def states(node: Node) -> dict[str, str]:
    """The state of each peer, for those whose first attempt has ended."""
    peers = json.loads(node.page("/health"))["peers"]
    return {name: each["state"] for name, each in peers.items() if "first attempt" not in each.get("reason", "")}


@contextmanager
def started(nodes: list[Node], expected: dict[str, str]) -> Iterator[Node]:
    """Nodes that run, once the first one knows the states of its peers."""
    try:
        for node in nodes:
            node.start()

        def known() -> bool:
            try:
                return states(nodes[0]) == expected
            except OSError:
                assert nodes[0].running, nodes[0].log.read_text()
                return False

        wait_until(known, f"the states of the peers are {expected}", 60)
        yield nodes[0]
    finally:
        for node in nodes:
            node.stop()


def found(report: dict[str, Any], check: str, where: str, cure: str) -> None:
    """The report has this finding, with its cure."""
    matching = [each for each in report["findings"] if each["check"] == check and where in each["where"]]
    assert any(cure in each["cure"] for each in matching), (check, report["findings"])


# -- nodes without certificates

PLAIN = [
    ("peer-one-sided", "a-lacks", "list this node in 'peers' of 'a-lacks'"),
    ("members-differ", "m - a-lacks", "add m to 'peers' of a-lacks"),
    ("peer-not-member", "z-lacks", "the same 'peers'"),
    ("peer-secret", "z-secret", "the same 'cluster_secret'"),
    ("cluster-secret", "z-secret", "the same 'cluster_secret'"),
    ("peer-cluster", "z-cluster", "'cluster'"),
    ("settings-must-agree", "z-cluster", "one value on all nodes"),
    ("peer-unreachable", "z-dead", "start the daemon of 'z-dead'"),
    ("other-ring", "z-ring", "the same sizes"),
    ("clock-skew", "z-other", "timedatectl"),
    ("settings-differ", "z-other", "one value on all nodes"),
    ("tenant-secrets", "z-other", "the same secrets"),
    ("locations", FIRST, "set 'location' on all nodes"),
    ("layouts", "weights", "the same weights"),
    ("layouts", "dtype", "--kv-cache-dtype"),
    ("layouts", "tokens", "segment_tokens"),
]


def secrets(file: Path, cluster_secret: str, tenant: str) -> dict[str, str]:
    file.write_text(
        f"cluster_secret = '{cluster_secret}'\n[[tenants]]\nname = 'red'\nsecret = '{tenant}'\ntokens = ['{TOKEN}']\n"
    )
    file.chmod(0o600)
    return {"config": str(file)}


STATES = {
    "a-lacks": "unreachable",
    "z-lacks": "refused",
    "z-secret": "refused",
    "z-cluster": "refused",
    "z-dead": "unreachable",
    "z-other": "connected",
    "z-ring": "other ring",
}


class Examined(NamedTuple):
    report: dict[str, Any]
    node: Node


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examined]:
    """The report about a node whose peers are each wrong in another way."""
    directory = tmp_path_factory.mktemp("plain")
    names = (FIRST, "a-lacks", "z-lacks", "z-secret", "z-cluster", "z-dead", "z-other", "z-ring")
    ports = {name: reserve_port() for name in names}
    listed = ",".join(f"{name}=127.0.0.1:{port}" for name, port in ports.items())
    common = {"memory": "4MiB", "region-size": "1MiB", "peers": listed}
    right = secrets(directory / "right.toml", "ab" * 32, "aa" * 32)
    own: dict[str, dict[str, str]] = {name: dict(right) for name in names}
    for name in ("a-lacks", "z-lacks"):
        own[name]["peers"] = f"{name}=127.0.0.1:{ports[name]}"
    own["z-secret"] = secrets(directory / "other.toml", "cd" * 32, "aa" * 32)
    own["z-cluster"]["cluster"] = "other"
    own["z-other"] = secrets(directory / "tenant.toml", "ab" * 32, "bb" * 32) | {
        "match-deadline-ms": "35",
        "location": "rack-1",
    }
    own["z-ring"]["peers"] = f"{FIRST}=127.0.0.1:{ports[FIRST]},z-ring=127.0.0.1:{ports['z-ring']}"
    nodes = []
    for name in names:
        module = "tests.operator.skewed_daemon" if name == "z-other" else "tokenlake_server"
        settings = {**common, "listen": f"127.0.0.1:{ports[name]}", **own[name]}
        nodes.append(Node(name, directory, settings, module))
    [first, *others] = [node for node in nodes if node.name != "z-dead"]
    with started([first, *others], STATES), ExitStack() as stack:
        other = next(node for node in others if node.name == "z-other")
        for model, change in (
            ("weights", {"weights_digest": "01"}),
            ("dtype", {"dtype": "float16"}),
            ("tokens", {"segment_tokens": 32}),
        ):
            layout = msgspec.structs.replace(LAYOUT, model_id=model)
            stack.enter_context(Pool.connect(first.socket, layout, TOKEN, deadlines=PATIENT))
            changed = msgspec.structs.replace(layout, **change)
            stack.enter_context(Pool.connect(other.socket, changed, TOKEN, deadlines=PATIENT))
        yield Examined(examined(first), first)


@pytest.mark.parametrize(("check", "where", "cure"), PLAIN)
def test_planted_between_nodes_without_certificates(plain: Examined, check: str, where: str, cure: str) -> None:
    found(plain.report, check, where, cure)


def test_the_pages_and_the_log_name_each_state(plain: Examined) -> None:
    """Exactly one state of each peer is 1. The log says so without a request for a page."""
    node = plain.node
    peers, samples = json.loads(node.page("/health"))["peers"], node.metrics()
    assert total(node, "tokenlake_peer_state") == len(STATES)
    for name, state in STATES.items():
        assert samples[f'tokenlake_peer_state{{peer="{name}",state="{state}"}}'] == 1
    for name, reason in (("a-lacks", f"must include '{FIRST}'"), ("z-dead", "refused"), ("z-ring", "'peers'")):
        assert reason in peers[name]["reason"]
    for line in ("peer z-dead: unreachable for 1", "peer z-lacks: refused for 1"):
        wait_until(lambda line=line: line in node.log.read_text(), line, WARN_S + 10)  # type: ignore[misc]
    log = node.log.read_text()
    assert "peer z-other:" not in log
    lines = [each for each in log.splitlines() if "'z-secret' did not prove to 'm'" in each]
    assert lines
    assert all("TOKENLAKE_CLUSTER_SECRET" in line for line in lines)
    assert not any(secret * 8 in log for secret in ("ab", "cd", "aa", "bb"))
    assert json.loads(node.page("/ready")) == {"node": FIRST, "ready": True}


def test_the_paths_of_connected_peers_are_measured(plain: Examined) -> None:
    paths = plain.report["paths"]
    pairs = {(path["from"], path["to"]) for path in paths}
    assert pairs == {("z-other", "m"), ("m", "z-other"), ("z-ring", "m"), ("m", "z-ring")}
    assert all(path["bytes_per_s"] > 1e6 and 0 < path["round_trip_s"] < 1 for path in paths)
    assert not any(secret * 8 in json.dumps(plain.report) for secret in ("ab", "cd", "aa", "bb"))


# -- nodes with certificates

ENCRYPTED = [
    ("peer-certificate-ca", "z-ca", "ask first whether both nodes belong to this cluster"),
    ("peer-certificate-expired", "z-late", "renew"),
    ("peer-certificate-name", "z-name", "correct the address of that node"),
    ("peer-encryption", "z-plain", "'certificate', 'key' and 'ca' on all nodes"),
    ("settings-changed", "m.toml", "restart the daemon"),
]


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("encrypted")
    ca, other = certified.authority(directory / "ca"), certified.authority(directory / "other")
    month = datetime.timedelta(days=30)
    issue(ca, "z-late", days=10, begin=datetime.datetime.now(datetime.UTC) - month)
    names = (FIRST, "z-ca", "z-late", "z-name", "z-plain")
    ports = {name: reserve_port() for name in names}
    listed = [f"{name}=127.0.0.1:{port}" for name, port in ports.items()]
    common = {"memory": "4MiB", "region-size": "1MiB"}
    nodes = []
    for name in names:
        # The daemon at the address of z-name is another node.
        node = name.replace("z-name", "y")
        files = {} if name == "z-plain" else certified.files(other if name == "z-ca" else ca, node)
        peers = ",".join(listed).replace("z-name=", f"{node}=") if node == "y" else ",".join(listed)
        settings = {**common, "peers": peers, "listen": f"127.0.0.1:{ports[name]}", **files}
        nodes.append(Node(node, directory, settings))
    with started(nodes, dict.fromkeys(names[1:], "refused")) as first:
        # The file says now what the daemon was not started with.
        settings = {name.replace("-", "_"): value for name, value in first.settings.items()} | {"memory": "8MiB"}
        settings["peers"] = listed  # type: ignore[assignment]
        file = directory / "m.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        result = run(doctor, "--config", file, "--json")
        assert result.exit_code == 1, result.stderr
        yield json.loads(result.stdout)


@pytest.mark.parametrize(("check", "where", "cure"), ENCRYPTED)
def test_planted_between_nodes_with_certificates(encrypted: dict[str, Any], check: str, where: str, cure: str) -> None:
    found(encrypted, check, where, cure)


# -- a firewall, etcd, a stopped daemon


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_firewall_between_nodes(tmp_path: Path) -> None:
    """The second interface of node0 takes no packets from node1."""
    names = node_names(2)
    with (
        Network(names) as network,
        two(tmp_path, [network.host(name, 1) for name in names], encrypted=True, network=network) as cluster,
    ):
        assert examined(cluster.nodes[1])["findings"] == []
        network.drop(names[1], names[0], 1)
        report = examined(cluster.nodes[1])
        assert checks(report) == ["path-closed"], report
        found(report, "path-closed", "node0 -> node1", "let the firewall pass TCP from node1")
        (closed,) = [path for path in report["paths"] if path["problem"]]
        assert closed["address"].startswith(network.host(names[0], 1))
        network.drop(names[1], names[0])
        cluster.nodes[1].stop()
        settings = {name.replace("-", "_"): value for name, value in cluster.nodes[1].settings.items()}
        file = tmp_path / "node1.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        before = network.inside(names[1], lambda: run(doctor, "--config", file, "--json"))
        assert "peer-unreachable" in checks(json.loads(before.stdout)), before.output


@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
def test_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenlake_operator.doctor.membership.ETCD_S", 0.5)
    with EtcdServers() as etcd:
        nodes = []
        for name in ("a", "b"):
            own = {"listen": f"127.0.0.1:{reserve_port()}", "memory": "2MiB", "region-size": "256KiB"}
            nodes.append(Node(name, tmp_path, {"etcd": etcd.endpoints, **own}))
        with started(nodes, {"b": "connected"}) as first:
            assert examined(first)["findings"] == []
            file = tmp_path / "b.toml"
            own_socket = tmp_path / "elsewhere.sock"
            text = {"node": "b", "etcd": [etcd.endpoints], "memory": "2MiB", "region_size": "256KiB"}
            text |= {"listen": f"127.0.0.1:{reserve_port()}", "socket": str(own_socket), "metrics": ""}
            file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in text.items()))
            twice = json.loads(run(doctor, "--config", file, "--json").stdout)
            found(twice, "name-taken", "b", "another 'node'")
            nodes[1].kill()
            wait_until(lambda: "members-absent" in checks(examined(first, "--no-measure")), "b is absent")
            found(examined(first, "--no-measure"), "members-absent", "b", "tokenlake remove")
            etcd.kill()
            wait_until(lambda: "membership" in checks(examined(first, "--no-measure")), "etcd is missed")
            found(examined(first, "--no-measure"), "membership", "a", "start etcd")
            found(examined(first, "--no-measure"), "etcd", "etcd", "endpoint health")


def test_a_stopped_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenlake_operator.reaching.CALL_S", 0.5)
    with daemons(1) as cluster:
        node = cluster.nodes[0]
        node.freeze()
        try:
            report = examined(node)
        finally:
            node.thaw()
        assert checks(report) == ["daemon-silent"]
        found(report, "daemon-silent", str(control_of(node)), "kill -CONT")
        assert report["running"]


# -- nodes that are as they should be


def sound(report: dict[str, Any], pairs: int, *not_checked: str) -> None:
    assert report["findings"] == []
    assert report["not_checked"] == list(not_checked)
    assert len(report["paths"]) == pairs
    assert report["running"]


def test_sound_nodes_with_a_list(tmp_path: Path) -> None:
    with daemons(2, memory="8MiB") as cluster, cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        prompt = Prompt(1, 8)
        store(pool, prompt)
        wait_until(lambda: read(other, prompt) == 8, "read from the other node")
        for node in cluster.nodes:
            sound(examined(node), 2, "the file of the settings: give --config; the settings of the daemon were checked")


@pytest.fixture(scope="module")
def remote() -> Iterator[tuple[dict[str, str], Path]]:
    """Two sound nodes with a control plane for other machines: the addresses, the directory of the CA."""
    cluster = Cluster(2, "8MiB", "1MiB", match_deadline_ms="2000")
    addresses, ca = served(cluster), cluster.directory / "ca"
    for role in ("admin", "reader"):
        issue(ca, role, role=role)
    with cluster:
        yield addresses, ca


def asked(ca: Path, node: str, role: str) -> dict[str, Any]:
    """The report for a caller of this role. The sockets of this machine are not asked."""
    words = ["--certificate", ca / f"{role}.pem", "--key", ca / f"{role}-key.pem", "--ca", ca / "ca.pem", "--json"]
    result = run(doctor, "--node", node, *words)
    report: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code, report["findings"]) == (0, []), result.output
    return report


def test_sound_nodes_with_certificates_from_another_machine(remote: tuple[dict[str, str], Path]) -> None:
    addresses, ca = remote
    for node in (addresses["node0"], f"node1={addresses['node1']}"):
        sound(asked(ca, node, "admin"), 2)


def test_a_reader_is_told_what_was_not_checked(remote: tuple[dict[str, str], Path]) -> None:
    report = asked(remote[1], remote[0]["node0"], "reader")
    assert len(report["not_checked"]) == 2
    assert all("needs the role admin" in each for each in report["not_checked"])
