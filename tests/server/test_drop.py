"""The queries of the runbook name the cause of a drop of the hit rate: real daemons, real metrics, promtool.

A scene reads in health, then with one fault. Its three scrapes become series of 80 minutes, in which the counters grow
evenly: 65 minutes of health, then 15 with the fault. promtool evaluates the queries of the runbook over them.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.house.test_prometheus import PROMTOOL, RULES, needs_promtool, queries
from tests.robustness.live import LAYOUT, Prompt, daemons, freeze, pid_of, read, store, wait_told, wait_until
from tests.server.scene import OF_THIS_USER, tenants
from tokenlake.layout import Layout
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = [pytest.mark.live, needs_promtool]

HEALTHY, FAULTY = 65, 15
"""Minutes of the series."""
GREW = "topk(1, tokenlake:miss_share:growth1h)"
AWAY = 'up{job="tokenlake"} == 0 or tokenlake_peer_state{state=~"refused|unreachable"} == 1'
LATE = (
    "topk(1, increase(tokenlake_peer_timeouts_total[5m]) + increase(tokenlake_unanswered_fetches_total[5m]) + "
    "increase(tokenlake_aborted_fetches_total[5m]))"
)
AT_QUOTA = "tokenlake:quota_used:ratio > 0.95"
NEW_LAYOUT = (
    "sum by (tenant, layout) (tokenlake_layout_processes) unless "
    "sum by (tenant, layout) (tokenlake_layout_processes offset 1h)"
)
Scrape = dict[str, dict[str, float]]
"""By node: the values of its page; empty for a node that does not answer."""


def scrape(nodes: list[Node]) -> Scrape:
    pages: Scrape = {}
    for node in nodes:
        pages[node.name] = {}
        with contextlib.suppress(OSError, urllib.error.URLError):
            pages[node.name] = node.metrics() if node.running else {}
    return pages


def series(scrapes: list[Scrape]) -> list[dict[str, str]]:
    """The input of promtool for three scrapes: at the begin, before the fault and at the end."""
    found = []
    for node in scrapes[0]:
        begin, middle, end = (each[node] for each in scrapes)
        up = f'up{{job="tokenlake",instance="{node}"}}'
        found.append({"series": up, "values": f"1x{HEALTHY} {int(bool(end))}x{FAULTY}"})
        for name in sorted({*begin, *middle, *end}):
            labels = name.partition("{")[2].rstrip("}")
            full = f'{name.partition("{")[0]}{{job="tokenlake",instance="{node}"{"," if labels else ""}{labels}}}'
            found.append({"series": full, "values": f"{_values(name, begin, middle)} {_after(name, middle, end)}"})
    return found


def _counts(name: str) -> bool:
    return re.search(r"_(total|bucket|count|sum)(\{|$)", name) is not None


def _values(name: str, begin: dict[str, float], middle: dict[str, float]) -> str:
    if name not in middle:
        return f"_x{HEALTHY}"
    if not _counts(name):
        return f"{middle[name]}x{HEALTHY}"
    start = begin.get(name, 0.0)
    return f"{start}+{(middle[name] - start) / HEALTHY}x{HEALTHY}"


def _after(name: str, middle: dict[str, float], end: dict[str, float]) -> str:
    if name not in end:
        return f"_x{FAULTY}"
    if not _counts(name):
        return f"{end[name]}x{FAULTY - 1}"
    start = middle.get(name, 0.0)
    step = (end[name] - start) / FAULTY
    return f"{start + step}+{step}x{FAULTY - 1}"


def names(directory: Path, scrapes: list[Scrape], query: str, labels: str, expected: list[str]) -> None:
    """Check the values of some labels in the result of a query of the runbook at the end of the series."""
    assert query in queries(), f"the runbook has no query {query}"
    samples = [{"labels": f"{{{each}}}", "value": 1} for each in expected]
    test = {
        "interval": "1m",
        "input_series": series(scrapes),
        "promql_expr_test": [
            {"expr": f"group by ({labels}) ({query})", "eval_time": f"{HEALTHY + FAULTY}m", "exp_samples": samples}
        ],
    }
    file = directory / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def again(pool: Pool, prompts: list[Prompt], missing: bool = False) -> None:
    """Read prompts; an engine would compute those that are missing."""
    for prompt in prompts:
        found = read(pool, prompt)
        assert missing or found == prompt.segments


def prompts(seed: int, count: int = 8, segments: int = 6) -> list[Prompt]:
    return [Prompt(1000 * seed + number, segments) for number in range(count)]


@pytest.fixture
def three() -> Iterator[Cluster]:
    # Fetched copies are few, so that reads go to the owner again.
    with daemons(3, memory="4MiB", region_size="1MiB", match_deadline_ms="200") as cluster:
        yield cluster


@pytest.mark.parametrize("fault", ["killed", "too slow"])
def test_a_node_that_does_not_answer(three: Cluster, tmp_path: Path, fault: str) -> None:
    old, new, node = prompts(1), prompts(2), three.nodes[0]
    with three.connect(0, LAYOUT) as writer, three.connect(2, LAYOUT) as reader:
        for prompt in old + new:
            store(writer, prompt)
        wait_told(three)
        scrapes = [scrape(three.nodes)]
        again(reader, old)
        scrapes.append(scrape(three.nodes))
        if fault == "killed":
            node.kill()
            wait_until(lambda: three.nodes[2].metrics()["tokenlake_peers_connected"] == 1, "its end is noticed")
        else:
            freeze(pid_of(node))
        again(reader, new, missing=True)
        scrapes.append(scrape(three.nodes) if fault == "killed" else scrapes[1] | scrape(three.nodes[1:]))
        node.thaw() if fault == "too slow" else None
    if fault == "killed":
        names(tmp_path, scrapes, GREW, "cause", ['cause="unreachable"'])
        away = ['instance="node0"', 'instance="node1",peer="node0"', 'instance="node2",peer="node0"']
        names(tmp_path, scrapes, AWAY, "instance, peer", away)
    else:
        names(tmp_path, scrapes, GREW, "cause", ['cause="too_slow"'])
        names(tmp_path, scrapes, LATE, "instance", ['instance="node2"'])


def test_a_tenant_at_its_quota(tmp_path: Path) -> None:
    file = tenants(tmp_path, red=f"quota = 0.25\n{OF_THIS_USER}")
    few, many = prompts(1, 4), prompts(2, 40)
    with daemons(1, config=file) as cluster, cluster.connect(0, LAYOUT) as pool:
        for prompt in few:
            store(pool, prompt)
        scrapes = [scrape(cluster.nodes)]
        again(pool, few)
        scrapes.append(scrape(cluster.nodes))
        for prompt in many:
            store(pool, prompt)
        again(pool, few + many, missing=True)
        scrapes.append(scrape(cluster.nodes))
    names(tmp_path, scrapes, GREW, "cause, tenant", ['cause="evicted",tenant="red"'])
    names(tmp_path, scrapes, AT_QUOTA, "tenant", ['tenant="red"'])


def test_weights_that_changed(tmp_path: Path) -> None:
    layout: Layout = msgspec.structs.replace(LAYOUT, weights_digest="01")
    old = prompts(1)
    with daemons(1) as cluster:
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in old:
                store(pool, prompt)
            scrapes = [scrape(cluster.nodes)]
            again(pool, old)
            scrapes.append(scrape(cluster.nodes))
        with cluster.connect(0, layout) as pool:
            again(pool, old, missing=True)
            scrapes.append(scrape(cluster.nodes))
    names(tmp_path, scrapes, GREW, "cause", ['cause="never_stored"'])
    digits = layout.fingerprint()[:4].hex()
    names(tmp_path, scrapes, NEW_LAYOUT, "layout", [f'layout="{digits}"'])
