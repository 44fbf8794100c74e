"""`tokenlake check` beside daemons: bytes cross, or the command says why not, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from tests.operator.scene import control_of, run
from tests.robustness.live import LAYOUT, Prompt, daemons, store, total, wait_until
from tests.server.certified import authority, files
from tests.server.control.scene import certificates, local, served
from tests.server.scene import RED, private, tenants_text
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_operator.check import LEFT_BYTES, check
from tokenlake_operator.crossing import SEGMENTS, Checker, layout_of
from tokenlake_testing.cluster import SERVER, Cluster, Node, node_names
from tokenlake_testing.network import Network, missing

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with daemons(3, memory="16MiB") as cluster:
        yield cluster


def checked(node: Node, *arguments: object, status: int = 0) -> dict[tuple[str, str], dict[str, Any]]:
    """The crossings by the pair of nodes, as the command prints them with `--json`."""
    result = run(check, "--socket", control_of(node), *arguments, "--json")
    assert result.exit_code == status, result.output
    return {(each["source"], each["to"]): each for each in json.loads(result.stdout)["crossings"]}


def outcomes(found: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {pair: each["outcome"] for pair, each in found.items()}


def segments(node: Node) -> float:
    return total(node, "tokenlake_segments")


def test_bytes_cross_between_all_pairs(three: Cluster) -> None:
    found = checked(three.nodes[1])
    names = [node.name for node in three.nodes]
    assert outcomes(found) == {(one, other): "equal" for one in names for other in names if one != other}
    for each in found.values():
        assert each["nbytes"] == SEGMENTS << 20
        assert each["seconds"] > 0
        # On a busy machine a transfer may be late.
        assert not each["problem"] or each["problem"].startswith("late ")
    for node in three.nodes:
        wait_until(lambda node=node: segments(node) == 0, f"nothing is left at {node.name}")  # type: ignore[misc]


def test_the_table_has_a_row_for_each_pair(three: Cluster) -> None:
    result = run(check, "--socket", control_of(three.nodes[0]))
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()[:7]
    assert head.split() == ["from", "to", "bytes", "time", "rate"]
    assert [row.split()[2] for row in rows] == ["equal"] * 6
    assert all(len(line) <= 80 for line in (head, *rows))


def test_segments_of_engines_stay_and_give_the_size() -> None:
    """In a full memory the check takes slots of the engines' size, and evicts two of their segments at most."""
    with daemons(2, memory="2MiB") as cluster:
        for number in range(2):
            with cluster.connect(number, LAYOUT) as pool:
                store(pool, Prompt(number, 300))
        held = [segments(node) for node in cluster.nodes]
        found = checked(cluster.nodes[0])
        assert set(outcomes(found).values()) == {"equal"}, found
        assert {each["nbytes"] for each in found.values()} == {SEGMENTS * LAYOUT.segment_bytes}
        for node, before in zip(cluster.nodes, held, strict=True):
            assert segments(node) >= before - 2 * SEGMENTS


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_node_that_does_not_answer(how: str) -> None:
    with daemons(2, memory="16MiB") as cluster:
        here, other = cluster.nodes
        (other.freeze if how == "frozen" else other.kill)()
        try:
            found = checked(here, status=1)
        finally:
            if how == "frozen":
                other.thaw()
        assert set(outcomes(found).values()) == {"not checked"}
        assert outcomes(found).keys() == {("node0", "node1"), ("node1", "node0")}
        assert all("node1 was not asked: " in each["problem"] and each["cure"] for each in found.values())
        wait_until(lambda: segments(here) == 0, "nothing is left")


def test_with_a_certificate_at_other_machines() -> None:
    """The other node's control socket is not there, as on another machine."""
    cluster = Cluster(2, "16MiB", "1MiB", match_deadline_ms="2000")
    served(cluster)
    with cluster:
        here, other = cluster.nodes
        control_of(other).rename(control_of(other).with_suffix(".away"))
        without = checked(here, status=1)
        assert set(outcomes(without).values()) == {"not checked"}
        assert "no certificate was given" in without["node1", "node0"]["problem"]
        assert "probes pass" in without["node1", "node0"]["problem"]
        for role, outcome in (("admin", "equal"), ("reader", "failed")):
            held = certificates(cluster.directory / "ca", role, role)
            given = ("--certificate", held.certificate, "--key", held.key, "--ca", held.ca)
            found = checked(here, *given, status=0 if outcome == "equal" else 1)
            assert found["node0", "node1"]["outcome"] == outcome, found
        assert "role admin" in found["node0", "node1"]["cure"]


def test_tenants_that_differ_and_a_quota(tmp_path: Path) -> None:
    """The tenant is that of the token; another node that lacks it, or has no memory left for it, is named."""
    whole = tenants_text()
    lacking = private(tmp_path / "lacking.toml", whole.replace('name = "red"', 'name = "green"'))
    small = private(tmp_path / "small.toml", tenants_text(red="quota = 0.2"))
    config = private(tmp_path / "tenants.toml", whole)
    env = {"TOKENLAKE_ENGINE_CREDENTIAL": RED}
    with Cluster(2, "16MiB", "1MiB", config=config, match_deadline_ms="2000") as cluster:
        here, other = cluster.nodes
        assert set(outcomes(_found(here, env)).values()) == {"equal"}
        refused = run(check, "--socket", control_of(here))
        assert (refused.exit_code, "TOKENLAKE_ENGINE_CREDENTIAL" in refused.stderr) == (1, True), refused.stderr
        for file, said in ((lacking, "no tenant"), (small, "")):
            other.stop()
            other.start(config=file)
            cluster.wait_ready()
            found = _found(here, env)["node0", "node1"]
            assert found["outcome"] == ("failed" if said else "equal"), found
            assert said in found["problem"], found
            assert not said or "[[tenants]]" in found["cure"]


def test_left_at_one_machine_and_taken_at_another(three: Cluster) -> None:
    before = checked(three.nodes[0], "--take", status=1)
    assert set(outcomes(before).values()) == {"not checked"}
    assert "check --leave" in before["node1", "node0"]["cure"]
    for node in three.nodes[1:]:
        said = run(check, "--socket", control_of(node), "--leave")
        assert said.exit_code == 0, said.output
        assert f"{node.name} has 512 KiB" in said.stdout
    for _ in range(2):
        found = checked(three.nodes[0], "--take")
        assert outcomes(found) == {("node1", "node0"): "equal", ("node2", "node0"): "equal"}
    wait_until(lambda: segments(three.nodes[0]) == 0, "nothing is left where they were taken")


def test_other_bytes_are_named(three: Cluster) -> None:
    """What the source stores is not what it should: the command finds it, which trusts no checksum."""
    with Pool.connect(three.nodes[1].socket, layout_of(LEFT_BYTES)) as pool:
        here: Any = type("Here", (), {"name": "node1"})
        keys = Checker(here, pool, layout_of(LEFT_BYTES))._keys("node1")
        run(check, "--socket", control_of(three.nodes[1]), "--leave")

        with local(three.nodes[1]) as control:
            control.evict(keys=keys)
        wrong = [np.zeros(LEFT_BYTES, dtype=np.uint8) for _ in keys]
        assert set(pool.store_all(keys, wrong)) == {Code.COMMITTED}
    found = checked(three.nodes[0], "--take", status=1)["node1", "node0"]
    assert (found["outcome"], "other bytes" in found["problem"]) == ("failed", True)
    run(check, "--socket", control_of(three.nodes[1]), "--leave")


@contextlib.contextmanager
def certified(network: Network) -> Iterator[Cluster]:
    """Three daemons with certificates, on hosts of their own."""
    cluster = Cluster(3, "16MiB", "1MiB", None, SERVER, network, match_deadline_ms="2000")
    ca = authority(cluster.directory / "ca")
    for node in cluster.nodes:
        node.settings |= files(ca, node.name)
    with cluster:
        yield cluster


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_network_that_passes_nothing_between_two() -> None:
    """Both control planes answer. The pairs with a third node are as before."""
    names = node_names(3)
    with Network(names) as network, certified(network) as cluster:
        network.drop(names[1], names[2])
        network.drop(names[2], names[1])

        def noticed() -> bool:
            found = _found(cluster.nodes[0])
            one, other = found["node1", "node2"], found["node2", "node1"]
            return all(each["problem"].count(": ") >= 2 for each in (one, other))

        wait_until(noticed, "the reason is known")
        found = _found(cluster.nodes[0])
        failed = {pair for pair, outcome in outcomes(found).items() if outcome != "equal"}
        assert failed == {("node1", "node2"), ("node2", "node1")}, found
        assert all("node" in found[pair]["cure"] or "firewall" in found[pair]["cure"] for pair in failed)


def test_a_daemon_that_takes_no_bytes_is_named(tmp_path: Path) -> None:
    """Its control plane works, and its transfers do not."""
    fault = tmp_path / "fault"
    with daemons(2, memory="16MiB") as cluster:
        cluster.nodes[1].kill()
        cluster.nodes[1].start("tests.robustness.faulty_daemon", fault=str(fault))
        cluster.wait_ready()
        fault.write_text("sinks")
        found = checked(cluster.nodes[0], status=1)
        assert found["node0", "node1"]["outcome"] == "failed", found
        assert "did not come from node0 to node1" in found["node0", "node1"]["problem"]
        fault.write_text("")
        wait_until(lambda: set(outcomes(_found(cluster.nodes[0])).values()) == {"equal"}, "bytes cross again")


def _found(node: Node, env: dict[str, str] | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    result = run(check, "--socket", control_of(node), "--json", env=env)
    return {(each["source"], each["to"]): each for each in json.loads(result.stdout)["crossings"]}


def test_alone_and_with_wrong_options(tmp_path: Path) -> None:
    with daemons(1, memory="16MiB") as cluster:
        alone = run(check, "--socket", control_of(cluster.nodes[0]))
        assert (alone.exit_code, "only member" in alone.stdout) == (0, True)
    assert run(check, "--leave", "--take").exit_code == 2
    away = run(check, "--node", "10.0.0.1:7442")
    assert (away.exit_code, "on the machine of a node" in away.stderr) == (2, True)
    shutil.rmtree(tmp_path)
    gone = run(check, "--socket", tmp_path / "x.control")
    assert (gone.exit_code, len(gone.stderr.splitlines())) == (1, 1)
