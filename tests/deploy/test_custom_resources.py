"""The chart's objects for cert-manager, the Prometheus operator and KEDA, by the schemas of their definitions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import Object, all_values, example, objects

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-chart")

MODELS = Path(sys.prefix) / "kubernetes-models"
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (MODELS / "node_modules").is_dir(), reason="@kubernetes-models are not installed: make install-chart"
    ),
]
GROUPS = "cert-manager.io", "monitoring.coreos.com", "keda.sh"


def refusals(made: list[Object]) -> list[Any]:
    """For each object None, or what the schema of its kind refuses."""
    script = Path(__file__).with_name("custom_resources.mjs")
    ended = subprocess.run(
        ["node", str(script), str(MODELS)], input=json.dumps(made), capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(ended.stdout)
    return found


def custom(values: dict[str, Any]) -> list[Object]:
    return [each for each in objects(values) if each["apiVersion"].split("/")[0] in GROUPS]


def test_the_schemas_take_the_objects() -> None:
    made = [each for values in all_values() for each in custom(values.values[0])]
    kinds = {each["kind"] for each in made}
    assert kinds == {"Issuer", "Certificate", "ServiceMonitor", "PrometheusRule", "ScaledObject"}
    wrong = {each["metadata"]["name"]: found for each, found in zip(made, refusals(made), strict=True) if found}
    assert not wrong


def test_the_schemas_refuse_what_is_wrong() -> None:
    made = custom(example("daemonset"))
    changed = {
        "Issuer": lambda spec: spec.update(ca={}),
        "Certificate": lambda spec: spec.pop("secretName"),
        "ServiceMonitor": lambda spec: spec.pop("selector"),
        "PrometheusRule": lambda spec: spec["groups"][0].pop("name"),
        "ScaledObject": lambda spec: spec.pop("triggers"),
    }
    for each in made:
        changed[each["kind"]](each["spec"])
    assert changed.keys() == {each["kind"] for each in made}
    assert all(refusals(made))
