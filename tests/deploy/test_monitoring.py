"""The dashboard and the alert rules on live daemons, scraped by a real Prometheus: three daemons, two tenants with
quotas, one disk, one cold tier, a query engine, load beyond the memory, and a node that is killed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from tests.deploy.dashboard import VARIABLES
from tests.deploy.prometheus import CLUSTER, FASTER, PROGRAM, Prometheus, engine_page
from tests.deploy.test_dashboard import SERIES, queries, variables_replaced
from tests.house.test_prometheus import queries as runbook_queries
from tests.house.test_prometheus import rules
from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, PATIENT_S, Prompt, wait_until
from tests.server.scene import OF_THIS_USER, RED, tenants
from tokenlake.errors import CredentialRefused
from tokenlake.hints import Hints
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = [
    pytest.mark.live,
    pytest.mark.rest,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed: make install-tools"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed, which a query engine needs"),
    pytest.mark.timeout(300),
]

NO_SERIES = {
    "tokenlake_long_callback_seconds": "a series begins with the first callback over 1 ms",
    "tokenlake_certificate_begin_seconds": "these daemons have a secret in place of certificates",
    "tokenlake_certificate_end_seconds": "the same",
}
"""Names of series that these daemons do not have, and why."""
QUIET = {
    "Bytes of partial attention",
    "Deadlines missed",
    "Errors of disks",
    "Errors of the cold tier",
    "Peers that became suspect",
    "Queries answered",
    "Queue of disks",
    "Queue: requests under way",
    "Slots in quarantine",
    "Time in attention for others",
    "Wait for another engine",
    "Waits for other readers",
}
"""Panels whose values may all be 0, because nothing of the kind happens."""
FEW = 30
"""Segments of a prompt; the memory holds several of them."""
LONGEST_S = 900 // FASTER
"""Seconds, and evaluations, after which each alert would have fired."""
LATER = {
    "tokenlake:peer_not_connected:state": "all daemons that run are connected",
}
"""Recorded series that these daemons do not have, and why."""
SEGMENTS = 100
"""Of one prompt; a tenant's quota holds less than two."""


OF_A_USER = Hints(account="a user")


class Scene(NamedTuple):
    """Daemons and their Prometheus."""

    cluster: Cluster
    prometheus: Prometheus
    pools: Mapping[Node, tuple[Pool, ...]]
    """At each node, of the tenants red and blue."""

    def load(self, number: int, segments: int = SEGMENTS) -> None:
        """Engines of all nodes that run store a prompt each, and ask for these, those before them, and the first ones,
        which a disk may have."""
        for at, pool in enumerate(self._running()):
            prompt = Prompt(100 * number + at, segments)
            keys = pool.prefix(prompt.tokens).keys
            pool.store_all(keys, prompt.fill, patience=LIMIT_S, hints=OF_A_USER if number % 2 else None)
        for older in {0, 1, max(0, number - 1), number}:
            self.ask(range(100 * older, 100 * older + 6), segments)

    def ask(self, seeds: Sequence[int], segments: int = SEGMENTS) -> None:
        """Engines of all nodes that run read these prompts. They have a segment of each themselves."""
        for pool, seed in itertools.product(self._running(), seeds):
            keys = pool.prefix(Prompt(seed, segments).tokens).keys
            with pool.match(keys, deadline_s=PATIENT_S) as lease:
                lease.takes(LAYOUT.segment_tokens, len(keys) * LAYOUT.segment_tokens, 0.5)
                lease.fetch(deadline_s=LIMIT_S)

    def _running(self) -> list[Pool]:
        return [pool for node, pools in self.pools.items() if node.running for pool in pools]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("monitoring")
    file = tenants(directory, red="quota = 0.25\nsalt_quota = 0.2", blue=f"quota = 0.5\n{OF_THIS_USER}")
    with ExitStack() as stack:
        cluster = Cluster(3, "4MiB", "1MiB", None, config=file, match_deadline_ms="2000")
        disk = directory / "disk"
        disk.mkdir(mode=0o700)
        cluster.nodes[0].settings["disk"] = f"{disk}:{64 << 20}"
        cluster.nodes[1].settings["query-engine"] = "true"
        cold = directory / "cold"
        cold.mkdir(mode=0o700)
        cluster.nodes[1].settings["cold"] = str(cold)
        stack.enter_context(cluster)
        cluster.nodes[0].wait_disk()
        engine = stack.enter_context(engine_page())
        prometheus = stack.enter_context(Prometheus(directory, cluster.nodes, engine))
        pools = {
            node: tuple(
                stack.enter_context(Pool.connect(node.socket, LAYOUT, credential, deadlines=PATIENT))
                for credential in (RED, None)
            )
            for node in cluster.nodes
        }
        yield Scene(cluster, prometheus, pools)


def test_a_dead_node_fires_one_alert(scene: Scene) -> None:
    """Although segments that only it had are misses, and every other node has lost a peer."""
    prometheus = scene.prometheus
    scene.load(0, FEW)
    waiting = "up == 1 and on (instance) tokenlake_stored_segments_total > 0"
    wait_until(lambda: len(prometheus.query(waiting)) == len(scene.cluster.nodes), "all daemons are scraped")
    assert prometheus.alerts() == set()
    scene.cluster.nodes[2].kill()
    down = ("TokenLakeDaemonDown", "node2")
    fired: set[tuple[str, str]] = set()

    def told() -> bool:
        scene.ask(range(6), FEW)
        fired.update(prometheus.alerts())
        return down in fired

    wait_until(told, "an alert")
    until = prometheus.evaluations() + LONGEST_S
    wait_until(lambda: told() and prometheus.evaluations() > until, "no other alert", 3 * LONGEST_S)
    assert fired == {down}


def test_every_panel_has_series(scene: Scene) -> None:
    """And a value above 0; with all values of the variables, and with some. The names of series are made of labels that
    they have."""
    if scene.cluster.nodes[2].running:
        scene.cluster.nodes[2].kill()
    numbers = itertools.count()
    lacking: list[str] = []
    grown = set(QUIET)

    def complete(values: Mapping[str, str]) -> bool:
        scene.load(next(numbers))
        with contextlib.suppress(CredentialRefused):
            Pool.connect(scene.cluster.nodes[0].socket, LAYOUT, "of no tenant", deadlines=PATIENT)
        lacking.clear()
        asked = [query for query in queries() if not any(name in query.text for name in NO_SERIES)]
        for query in asked:
            series = scene.prometheus.query(variables_replaced(query.text, values))
            named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            if not series or any(not named <= set(each["metric"]) for each in series):
                lacking.append(f"{query.panel}: {query.legend}")
            grown.update(query.panel for each in series if float(each["value"][1]) > 0)
        lacking.extend({query.panel for query in asked} - grown)
        return not lacking

    try:
        for values in ({}, {"cluster": CLUSTER, "node": "node0|node1|node2", "tenant": "red"}):
            wait_until(functools.partial(complete, values), "every panel has series", 2 * LIMIT_S)
    except AssertionError as error:
        raise AssertionError(lacking) from error


def test_the_variables_have_values(scene: Scene) -> None:
    """What Grafana offers for each."""
    offered = {}
    for name, query in VARIABLES.items():
        ((selector, label),) = re.findall(r"label_values\((.*), (\w+)\)", query)
        offered[name] = scene.prometheus.values(label, variables_replaced(selector))
    assert offered == {"cluster": [CLUSTER], "node": ["node0", "node1", "node2"], "tenant": ["blue", "red"]}


def test_every_rule_is_evaluated(scene: Scene) -> None:
    """Without an error, on series that there are. The queries of the runbook too."""
    asked = [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)] + runbook_queries()
    names = {name for text in asked for name, _ in SERIES.findall(text)} - NO_SERIES.keys()
    assert len(names) > 20
    assert [name for name in sorted(names) if not scene.prometheus.query(name)] == []
    assert scene.prometheus.errors() == []
    for text in asked:
        scene.prometheus.query(text)
    recorded = {rule["record"] for rule in rules("record")}
    assert {name for name in recorded if scene.prometheus.query(name)} == recorded - LATER.keys()
