"""The dashboard as a file: what Grafana expects of it, and that its queries name series and labels that there are, in
units that fit. `test_monitoring.py` asks a Prometheus."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

import tests.house.pages  # noqa: F401 (imports every module that declares a metric)
from tests.deploy.dashboard import COLUMNS, SOURCE, VARIABLES, dashboard
from tests.deploy.generated import DASHBOARD
from tests.deploy.prometheus import OF_VLLM, Engine
from tokenlake.metrics import Metric
from tokenlake_client.engines.vllm.counters import COUNTS, PREFIX, TIMES

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
OF_TARGETS = {"job", "instance", "cluster"}
SERIES = re.compile(r"(?<![\w:])((?:vllm:|tokenlake_)\w+|up)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"')
LISTED = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right) \(([^)]*)\)")
UNITS = (
    (r"histogram_quantile", "s"),
    (r"^sum\(increase\(\w+_tokens_total\[\$__range\]\)\)$", "count:tokens"),
    (r"increase\(\w+_milliseconds_total\[\$__range\]\)\) / 1000$", "s"),
    (r"rate\(\w+_milliseconds_total\[.*\]\)\) / 1000$", "short"),
    (r" / ", "percentunit"),
    (r"rate\(\w+_seconds(_total)?\[", "percentunit"),
    (r"rate\([\w:]+_tokens_total\[", "count:tokens/s"),
    (r"rate\(\w+_segments_total\[", "count:segments/s"),
    (r"rate\(\w+_bytes(_total)?\[", "Bps"),
    (r"rate\([\w:]+_seconds(_total)?\[", "percentunit"),
    (r"rate\(", "cps"),
    (r"count ?(by|\()|tokenlake_(map_entries|engines|disk_errors|cold_errors)\b|\bup\b", "short"),
    (r"_bytes\b", "bytes"),
    (r"_share\b", "percentunit"),
    (r"_segments\b", "count:segments"),
    (r"_slots\b", "count:slots"),
    (r"num_requests_\w+\b", "count:requests"),
    (r"_seconds\b", "s"),
)
"""Patterns of queries without their selectors, of which the first that is found decides, and the unit."""


class Query(NamedTuple):
    """A query of a panel. `legend`: the name of its series."""

    panel: str
    text: str
    legend: str
    unit: str


def panels() -> list[dict[str, Any]]:
    """All panels but the headings of rows."""
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """All queries of the dashboard."""
    return [
        Query(panel["title"], target["expr"], target.get("legendFormat", ""), panel["fieldConfig"]["defaults"]["unit"])
        for panel in panels()
        for target in panel["targets"]
    ]


def variables_replaced(text: str, values: Mapping[str, str] | None = None, window: str = "30s") -> str:
    """A query as Grafana sends it, with these values of the variables, or all."""
    for name in VARIABLES:
        text = text.replace(f"${name}", (values or {}).get(name, ".*"))
    return text.replace("$__rate_interval", window).replace("$__range", window)


def labels() -> dict[str, set[str]]:
    """The labels of each series, without those of targets."""
    found = {metric.name: set(metric.labels) for metric in Metric.all("counter", "gauge")}
    of_engines = set(Engine.LABELS)
    found |= {PREFIX + count.metric + "_total": of_engines | set(count.labels) for count in COUNTS.values()}
    found |= dict.fromkeys(OF_VLLM, of_engines) | {"up": set()}
    for name in [metric.name for metric in Metric.all("histogram")]:
        found[f"{name}_bucket"] = {"le"}
    for name in [PREFIX + name for name in TIMES] + list(OF_VLLM):
        found[f"{name}_bucket"] = of_engines | {"le"}
    return found


def test_generated() -> None:
    assert DASHBOARD.read_text() == dashboard(), "run `python -m tests.deploy.generated`"


def test_every_panel_says_what_it_is() -> None:
    assert len({panel["title"] for panel in panels()}) == len(panels()) > 40
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [each["datasource"] for each in (panel, *panel["targets"])] == [SOURCE] * (1 + len(panel["targets"]))
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        if panel["type"] == "timeseries":
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert all(legends)
            assert len(set(legends)) == len(legends)
    names = [each["name"] for each in BOARD["templating"]["list"]]
    assert names == ["datasource", *VARIABLES]


def test_the_panels_fill_lines_without_overlaps() -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        for place in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert place not in taken, (panel["title"], place)
            taken[place] = panel["id"]
    assert {x for x, _ in taken} == set(range(COLUMNS))
    height = max(y for _, y in taken) + 1
    assert {y for _, y in taken} == set(range(height)), "no line is empty"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1))


def test_every_series_and_label_is_declared() -> None:
    known = labels()
    for query in queries():
        there = set(OF_TARGETS)
        selectors = SERIES.findall(query.text)
        assert selectors, query
        for name, matchers in selectors:
            assert name in known, query
            there |= known[name]
            assert "$cluster" in matchers, query
            assert set(MATCHER.findall(matchers)) <= known[name] | OF_TARGETS, query
        there |= set(re.findall(r', "(\w+)", "', query.text))  # of label_replace
        listed = {label for group in LISTED.findall(query.text) for label in re.findall(r"\w+", group)}
        assert listed <= there, query
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= there, query


def test_every_unit_fits() -> None:
    for query in queries():
        plain = re.sub(r"\{[^}]*\}", "", query.text)
        unit = next((unit for pattern, unit in UNITS if re.search(pattern, plain)), None)
        assert "roblems" in query.panel or query.unit == unit, plain


def test_grafanas_types_have_every_field_and_choice() -> None:
    """A field that Grafana's own types do not have is lost as they read the dashboard and write it again. They take any
    text in place of a choice, so choices are compared with theirs."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="Grafana's SDK is not installed: make install-chart"
    )
    common = pytest.importorskip("grafana_foundation_sdk.models.common")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    read = json.loads(encoder.encode(models.Dashboard.from_json(BOARD)))
    assert _lost(BOARD, read) == []
    choices = {
        "calcs": {"lastNotNull"},
        "cellHeight": common.TableCellHeight,
        "colorMode": common.BigValueColorMode,
        "displayMode": common.LegendDisplayMode,
        "graphMode": common.BigValueGraphMode,
        "justifyMode": common.BigValueJustifyMode,
        "orientation": common.VizOrientation,
        "placement": ("bottom", "right"),
        "showPoints": common.VisibilityMode,
        "sort": common.SortOrder,
        "textMode": common.BigValueTextMode,
    }
    found = [(name, value) for panel in panels() for name, value in _settings(panel["options"])]
    found += [each for panel in panels() for each in _settings(panel["fieldConfig"]["defaults"].get("custom", {}))]
    for name, value in found:
        assert name not in choices or value in [getattr(each, "value", each) for each in choices[name]], (name, value)
    assert {panel["type"] for panel in BOARD["panels"]} == {"row", "stat", "table", "timeseries"}


def _settings(given: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of settings at any depth that are texts."""
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _settings(each)
            elif isinstance(each, str):
                yield name, each


def _lost(given: Any, read: Any, at: str = "") -> list[str]:
    """The places of `given` that `read` lacks, or has other values at."""
    if isinstance(given, dict):
        return [
            lost
            for name, value in given.items()
            for lost in (
                _lost(value, read[name], f"{at}.{name}")
                if isinstance(read, dict) and name in read
                else [f"{at}.{name}"] * (value not in (None, []))
            )
        ]
    if isinstance(given, list):
        if not isinstance(read, list) or len(given) != len(read):
            return [at]
        return [
            lost for index, pair in enumerate(zip(given, read, strict=True)) for lost in _lost(*pair, f"{at}[{index}]")
        ]
    return [] if given == read else [f"{at}: {given!r} became {read!r}"]
