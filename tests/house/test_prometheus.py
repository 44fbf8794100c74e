"""The rules for Prometheus and the runbook: they use declared metrics only, and `promtool` accepts and tests them. The
dashboard: `tests/deploy`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.pages import ROOT  # imports every module that declares a metric
from tokenlake.documentation import page
from tokenlake.metrics import Metric
from tokenlake_client.engines.vllm.counters import COUNTS, PREFIX, TIMES

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
OPERATIONS = ROOT / "docs" / "operations"
RUNBOOK = OPERATIONS / "runbook.md"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: make install-tools")

yaml = pytest.importorskip("yaml")

NAME = re.compile(r"(?:vllm:)?\btokenlake[_:][a-z0-9_:]+\b")
OTHER = {"tokenlake_server", "tokenlake_client", "tokenlake_testing", "tokenlake_query", "tokenlake_proto"}
"""Names of packages."""


def groups() -> list[dict[str, list[dict[str, str]]]]:
    found: list[dict[str, list[dict[str, str]]]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def rules(kind: str) -> list[dict[str, str]]:
    """The rules of all groups that `record` or `alert`."""
    return [rule for group in groups() for rule in group["rules"] if kind in rule]


def known() -> set[str]:
    """The names of all series: those of daemons, of vLLM's page, and those that the rules record."""
    names = {metric.name for metric in Metric.all("counter", "gauge")} | {rule["record"] for rule in rules("record")}
    for name in [metric.name for metric in Metric.all("histogram")] + [PREFIX + name for name in TIMES]:
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names | {f"{PREFIX}{count.metric}_total" for count in COUNTS.values() if count.metric}


def queries() -> list[str]:
    """The queries of the pages of operations, most of them of the runbook."""
    text = "".join(page.read_text() for page in sorted(OPERATIONS.glob("*.md")))
    blocks: list[str] = re.findall(r"^ *```promql\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [" ".join(block.split()) for block in blocks]


def test_every_metric_is_declared() -> None:
    used = [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)] + queries()
    assert len(queries()) > 15
    for text in used:
        assert "tokenlake" in text
        assert set(NAME.findall(text.replace('job="tokenlake"', ""))) <= known(), text
    prose = {name for page in OPERATIONS.glob("*.md") for name in NAME.findall(page.read_text())} - OTHER
    histograms = {metric.name for metric in Metric.all("histogram")}
    assert {name for name in prose if not name.endswith(("_", ":"))} <= known() | histograms


def test_every_alert_names_a_section_of_the_runbook() -> None:
    headings = re.findall(r"^#+ (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert len(rules("alert")) > 10
    for rule in rules("alert"):
        annotations: dict[str, str] = rule["annotations"]  # type: ignore[assignment]
        address, _, anchor = annotations["runbook_url"].partition("#")
        assert f"{address}#" == page("operations/runbook#"), "run `python -m tests.deploy.generated`"
        assert anchor in anchors, rule["alert"]
        assert annotations["summary"]
        assert annotations["description"]


def test_every_alert_has_a_test() -> None:
    tested = yaml.safe_load((RULES.parent / "tests.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tested for each in test.get("alert_rule_test", ()) if each["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules("alert")}


@needs_promtool
def test_promtool_accepts_the_files_and_the_queries(tmp_path: Path) -> None:
    written = tmp_path / "queries.yml"
    recorded = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(queries())]
    written.write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    for files in (["check", "rules", RULES, written], ["check", "config", RULES.parent / "prometheus.yml"]):
        done = subprocess.run([str(PROMTOOL), *map(str, files)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_pass_their_tests() -> None:
    command = [str(PROMTOOL), "test", "rules", "tests.yml"]
    done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
