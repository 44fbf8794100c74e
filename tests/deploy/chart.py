"""The chart, rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart" / "tokenlake"
EXAMPLES = ROOT / "deploy" / "chart" / "examples"
MANIFESTS = ROOT / "deploy" / "manifests"
RELEASE = NAMESPACE = "tokenlake"

Object = dict[str, Any]

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
PEERS = {"etcd": {"endpoints": ["etcd:2379"]}, "certificates": {"nodes": ["gpu-1"]}}
ENGINE = {"enabled": True, "model": "m/x"}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "unencrypted": {"etcd": {"endpoints": ["etcd:2379"]}, "unencrypted": True},
    "issuer": PEERS | {"certificates": {"nodes": ["gpu-1"], "issuer": {"name": "pki", "kind": "ClusterIssuer"}}},
    "IPv6": PEERS | {"ipFamily": "IPv6"},
    "settings": {
        "settings": {"allow_uids": [10001, 1000650000], "lease_s": 2.5, "query_engine": True, "location": "row/rack"},
        "secretSettings": [{"setting": "disk_keys", "secret": "keys", "key": "disk"}],
        "image": {"pullSecrets": ["registry"]},
        "daemon": {"priorityClassName": "pools", "annotations": {"a": "b"}, "labels": {"c": "d"}},
        "user": 1000650000,
    },
    "huge pages": {"settings": {"huge_pages": True}, "daemon": {"resources": {"hugepages-2Mi": "16386Mi"}}},
    "one engine": {"mode": "sidecar", "engine": ENGINE | {"replicas": 1}},
    "engines that come and go": {"mode": "sidecar", "engine": ENGINE, "etcd": {"endpoints": ["etcd:2379"]}},
    "dashboard": {"monitoring": {"dashboard": True, "prometheusRule": True, "labels": {"release": "p"}}},
}


def example(name: str) -> Object:
    """The values of an example."""
    yaml = pytest.importorskip("yaml")
    found: Object = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return found


def all_values() -> list[Any]:
    return [pytest.param(example(name), id=name) for name in NAMES] + [
        pytest.param(values, id=name) for name, values in VARIANTS.items()
    ]


def files(values: Mapping[str, Any]) -> dict[str, str]:
    """What the chart makes of these values, by template. Raises helm's errors."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-chart")
    with helm.Chart.load(str(CHART)) as chart:
        made = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return {name: text for name, text in sorted(made.items()) if name.endswith(".yaml") and text.strip()}


def objects(values: Mapping[str, Any]) -> list[Object]:
    """The objects that the chart makes of these values."""
    yaml = pytest.importorskip("yaml")
    return [each for text in files(values).values() for each in yaml.safe_load_all(text) if each]


def one(made: list[Object], kind: str, ending: str = "") -> Object:
    """The object of this kind whose name ends so."""
    (found,) = [each for each in made if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]
    return found


def pods(made: list[Object]) -> Iterator[tuple[str, Object]]:
    """The specifications of all pods, with the kind of what makes them."""
    for each in made:
        if "template" in each.get("spec", {}):
            yield each["kind"], each["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def daemon_of(made: list[Object]) -> tuple[Object, Object]:
    """The pod with a daemon, and the daemon's container."""
    for _, pod in pods(made):
        for container in containers(pod):
            if container["name"] == "tokenlake":
                return pod, container
    raise AssertionError("no pod has a daemon")


def environment(container: Object, fields: Mapping[str, str], secret: str = "") -> dict[str, str]:
    """The variables of a container as kubelet sets them. `fields`: the values of the pod's own fields. `secret`: the
    content of each key of a Secret."""
    made: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            value = variable["value"]
            for name, known in made.items():
                value = value.replace(f"$({name})", known)
        elif "fieldRef" in variable["valueFrom"]:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = secret
        made[variable["name"]] = value
    return made
