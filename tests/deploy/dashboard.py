"""The dashboard for Grafana: its format and layout. `python -m tests.deploy.generated` writes its JSON, and `panels.py`
has what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.deploy.panels import ROWS, STATS, Panel

SCHEMA = 38
"""The version of the schema of dashboards in Grafana 10; later versions of Grafana convert it as they load it."""
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTORS = {
    "{N": '{cluster=~"$cluster",instance=~"$node"',
    "{T": '{cluster=~"$cluster",instance=~"$node",tenant=~"$tenant"',
    "{E": '{cluster=~"$cluster"',
}
VARIABLES = {
    "cluster": 'label_values(up{job="tokenlake"}, cluster)',
    "node": 'label_values(up{job="tokenlake",cluster=~"$cluster"}, instance)',
    "tenant": 'label_values(tokenlake_quota_bytes{cluster=~"$cluster"}, tenant)',
}


def _target(panel: Panel, at: int) -> dict[str, Any]:
    """Query `at` of a panel."""
    text, legend = panel.queries[at]
    for short, selector in SELECTORS.items():
        text = text.replace(short, selector)
    target = {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": text}
    if panel.kind == "table":
        return target | {"instant": True, "range": False, "format": "table"}
    return target | {"legendFormat": legend} | ({"instant": True, "range": False} if panel.kind == "stat" else {})


def _placed(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel in Grafana's format, at column `x` of line `y`."""
    defaults: dict[str, Any] = {"unit": panel.unit}
    made: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [_target(panel, at) for at in range(len(panel.queries))],
    }
    if panel.kind == "timeseries":
        made["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["min"] = 0
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    elif panel.kind == "stat":
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if panel.red_from is not None:
            steps.append({"color": "red", "value": panel.red_from})
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        made["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
            "textMode": "value_and_name" if len(panel.queries) > 1 else "value",
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
        }
    else:
        hidden = {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}
        made |= {"options": {"showHeader": True, "cellHeight": "sm"}, "transformations": [hidden]}
    return made


def _panels() -> Iterator[dict[str, Any]]:
    """All panels, from left to right and from top to bottom, with a heading before each row but the first."""
    number, y = 0, 0
    for heading, row in {"": STATS, **ROWS}.items():
        if heading:
            number += 1
            yield {
                "id": number,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
            y += 1
        x = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            number += 1
            yield _placed(panel, number, x, y)
            x += panel.width
        y += row[-1].height


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, query in VARIABLES.items():
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def dashboard() -> str:
    """`deploy/grafana/tokenlake.json`."""
    board = {
        "title": "TokenLake",
        "uid": "tokenlake",
        "description": "A pool of KV cache: what it supplies, what is missed and why, and its nodes.",
        "tags": ["tokenlake", "vllm"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1) + "\n"
