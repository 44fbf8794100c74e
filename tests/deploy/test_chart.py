"""The chart: values that are refused, what it makes of others, and that the daemon takes what it is given."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import (
    CHART,
    ENGINE,
    MANIFESTS,
    NAMES,
    NAMESPACE,
    ROOT,
    VARIANTS,
    Object,
    all_values,
    containers,
    daemon_of,
    environment,
    example,
    objects,
    one,
    pods,
)
from tests.deploy.generated import SCHEMA, manifests, schema
from tests.deploy.pod_security import violations
from tests.house.version import stated
from tests.kernel_files import kernel_files
from tests.server.test_memory_limit import BEYOND, OF_A_SEGMENT
from tokenlake.config import ServerConfig, load_config, parse_size
from tokenlake.config.setting import settings_of
from tokenlake.errors import LimitReached
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_server.start import available_memory

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install-chart")
yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.rest

VERSIONS = "1.30", "1.37"
"""The oldest version of Kubernetes that the chart names, and the newest whose schemas are known."""
every = pytest.mark.parametrize("values", all_values())


def test_lint() -> None:
    for name in NAMES:
        found = helm.lint(str(CHART), values=example(name))
        messages = [each for each in found["messages"] if "icon is recommended" not in str(each)]
        assert not messages
        assert not found["errors"]


def test_generated() -> None:
    expected = manifests() | {SCHEMA: schema()}
    stale = [str(path) for path, text in expected.items() if not path.exists() or path.read_text() != text]
    assert not stale, "run `python -m tests.deploy.generated`"
    there = {path for path in MANIFESTS.rglob("*") if path.is_file()}
    assert there == expected.keys() - {SCHEMA}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"memroy": "1GiB"}, "memroy"),
        ({"memory": "64G"}, "memory"),
        ({"memory": 64}, "memory"),
        ({"mode": "deployment"}, "mode"),
        ({"settings": {"lease_s": 0}}, "lease_s"),
        ({"settings": {"lease": 5}}, "lease"),
        ({"settings": {"memory": "1GiB"}}, "memory"),
        ({"settings": {"cluster_secret": "aa"}}, "cluster_secret"),
        ({"settings": {"fabric": "yes"}}, "fabric"),
        ({"secretSettings": [{"setting": "memory", "secret": "s", "key": "k"}]}, "setting"),
        ({"secretSettings": [{"setting": "disk_keys", "secret": "s"}]}, "key"),
        ({"user": 0}, "user"),
        ({"etcd": {"endpoints": ["https://etcd:2379"]}}, "endpoints"),
        ({"certificates": {"nodes": ["GPU_1"]}}, "nodes"),
        ({"disk": {"path": "mnt"}}, "path"),
        ({"daemon": {"resources": {"memory": "1Gi"}}}, "resources"),
        ({"engine": {"replicas": 0}}, "replicas"),
        ({"monitoring": {"serviceMonitor": "yes"}}, "serviceMonitor"),
        ({"drainSeconds": -1}, "drainSeconds"),
    ],
)
def test_values_that_the_schema_refuses(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        objects(values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"etcd": {"endpoints": ["etcd:2379"]}}, "certificates.nodes"),
        ({"mode": "sidecar"}, "engine.enabled"),
        ({"engine": {"enabled": True}}, "engine.model"),
        ({"mode": "sidecar", "engine": ENGINE | {"autoscaling": {"enabled": True}}}, "engine.autoscaling"),
        ({"mode": "sidecar", "engine": ENGINE, "disk": {"path": "/mnt"}}, "disk.path"),
    ],
)
def test_values_that_contradict_each_other(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        objects(values)


@pytest.mark.parametrize("version", VERSIONS)
@every
def test_the_kubernetes_api_takes_the_objects(values: dict[str, Any], version: str) -> None:
    """By the schemas of Kubernetes' own kinds; those of custom resources: `test_custom_resources.py`."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = 0
    for made in objects(values):
        if made["apiVersion"].split("/")[0] in ("v1", "apps", "policy", "networking.k8s.io"):
            validator.validate(made, version, strict=True)
            checked += 1
    assert checked >= 2


@every
def test_selectors_and_references(values: dict[str, Any]) -> None:
    """Each selector selects the labels of its pods, and each volume that is mounted is there."""
    made = objects(values)
    for each in made:
        if "template" not in each.get("spec", {}):
            continue
        labels, pod = each["spec"]["template"]["metadata"]["labels"], each["spec"]["template"]["spec"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        volumes = [volume["name"] for volume in pod["volumes"]]
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        assert len(volumes) == len(mounted)
        for container in containers(pod):
            names = [variable["name"] for variable in container.get("env", ())]
            assert len(names) == len(set(names))
            ports = {port["name"] for port in container.get("ports", ())}
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                if name in container:
                    assert container[name]["httpGet"]["port"] in ports
    daemons = one(made, "Service", NAMESPACE)["spec"]["selector"]
    owners = [each for each in made if "template" in each.get("spec", {})]
    assert any(daemons.items() <= each["spec"]["template"]["metadata"]["labels"].items() for each in owners)
    for each in made:
        assert each["metadata"].get("namespace") == (None if each["kind"] == "PersistentVolume" else NAMESPACE)


def test_restricted_pods() -> None:
    """What the level `restricted` refuses is a directory of the machine, and root that makes one."""
    found = {}
    for name in NAMES:
        for kind, pod in pods(objects(example(name))):
            found[name, kind] = violations(pod)
    assert found == {
        ("sidecar", "StatefulSet"): [],
        ("restricted", "DaemonSet"): [],
        ("daemonset", "DaemonSet"): ["capabilities", "runAsNonRoot", "runAsUser", "volume hostPath"],
        ("daemonset", "Deployment"): ["volume hostPath"],
    }
    for name in NAMES:
        pod, daemon = daemon_of(objects(example(name)))
        assert violations({**pod, "volumes": [], "initContainers": [], "containers": [daemon]}) == []
        assert daemon["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False


def test_the_rules_of_restricted_find_what_breaks_them() -> None:
    pod, daemon = daemon_of(objects(example("sidecar")))
    for changed, rule in (
        ({"securityContext": {}}, "allowPrivilegeEscalation"),
        ({"securityContext": daemon["securityContext"] | {"privileged": True}}, "privileged"),
        ({"securityContext": daemon["securityContext"] | {"runAsUser": 0}}, "runAsUser"),
        ({"securityContext": daemon["securityContext"] | {"capabilities": {"drop": ["NET_RAW"]}}}, "capabilities"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, "hostPort"),
        ({"livenessProbe": {"httpGet": {"path": "/", "port": 1, "host": "10.0.0.1"}}}, "host of a probe"),
    ):
        assert rule in violations({**pod, "initContainers": [daemon | changed]})
    for more, rule in (
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "volume hostPath"),
        ({"securityContext": {"runAsNonRoot": True}}, "seccompProfile"),
        ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, "sysctl kernel.msgmax"),
    ):
        assert rule in violations(pod | more)


def mebibytes(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi"))


@pytest.mark.parametrize(
    ("memory", "smallest", "more"),
    [
        ("16GiB", "1MiB", {}),
        ("1500MiB", "256KiB", {}),
        ("2TiB", "4MiB", {}),
        ("64GiB", "1MiB", {"query_engine": True}),
    ],
)
def test_the_memory_of_a_pod(memory: str, smallest: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The limit is `memory` and the bound of the documents (`tests/server/test_memory_limit.py`). The daemon, in a
    cgroup of either version with that limit, says that it has enough, and with less that it has not."""
    values = {"memory": memory, "smallestSegment": smallest, "settings": more, "daemon": {"commands": "100MiB"}}
    _, daemon = daemon_of(objects(values))
    limit = mebibytes(daemon["resources"]["limits"]["memory"])
    assert daemon["resources"]["requests"]["memory"] == f"{limit}Mi"
    mib, nbytes = 1 << 20, parse_size(memory)
    bound = BEYOND + OF_A_SEGMENT * (nbytes // parse_size(smallest)) + 400 * mib * bool(more)
    assert limit == -(-(nbytes + bound + 101 * mib) // mib)
    for version, name, use in (
        (1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (2, "memory.max", "memory.current"),
    ):
        for given, enough in ((limit * mib, True), (nbytes + available_memory.RESERVE_BYTES - mib, False)):
            place = tmp_path / f"{version}{enough}"
            place.mkdir()
            proc = kernel_files(place, version, "/", {name: given, use: 0})
            (proc / "meminfo").write_text(f"MemAvailable: {4 << 30} kB\n")
            try:
                available_memory.require_memory(nbytes, proc=proc)
                found = True
            except LimitReached:
                found = False
            assert found == enough


def test_huge_pages_are_beside_the_limit() -> None:
    _, daemon = daemon_of(objects(VARIANTS["huge pages"]))
    limits = daemon["resources"]["limits"]
    assert limits["hugepages-2Mi"] == daemon["resources"]["requests"]["hugepages-2Mi"] == "16386Mi"
    assert 200 < mebibytes(limits["memory"]) < 500


def test_the_figure_of_the_page() -> None:
    _, daemon = daemon_of(objects({"memory": "64GiB"}))
    page = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
    assert f"`memory: 64GiB` gives {mebibytes(daemon['resources']['limits']['memory']):,} MiB" in page


FIELDS = {"spec.nodeName": "gpu-1", "metadata.name": "tokenlake-engine-0", "status.podIP": "10.1.2.3"}


def config_of(daemon: Object, fields: Mapping[str, str]) -> ServerConfig:
    """The settings of the daemon in a pod with these fields."""
    environ = environment(daemon, fields, "ab" * 32)
    return load_config(toml_text=None, environ=environ, flags={}, uid=10001).config


@every
def test_the_daemon_takes_its_settings(values: dict[str, Any]) -> None:
    _, daemon = daemon_of(objects(values))
    v6 = values.get("ipFamily") == "IPv6"
    fields = FIELDS | ({"status.podIP": "fd00::1"} if v6 else {})
    settings = config_of(daemon, fields)
    assert settings.node in (FIELDS["spec.nodeName"], FIELDS["metadata.name"])
    assert settings.memory == parse_size(values.get("memory", "16GiB"))
    assert settings.socket == "/run/tokenlake/tokenlake-local.sock"
    if settings.etcd:
        assert settings.advertise == ("[fd00::1]:7440" if v6 else "10.1.2.3:7440")
    if settings.peers:
        assert settings.advertise == "tokenlake-engine-0.tokenlake.tokenlake.svc:7440"
        assert [peer.host for peer in settings.peers] == ["tokenlake-engine-1.tokenlake.tokenlake.svc"]


@every
def test_a_pod_has_the_time_that_its_end_takes(values: dict[str, Any]) -> None:
    """The documents ask for more than `drain_s` + `disk_save_s` + 20 s; a sidecar ends after its engine."""
    pod, daemon = daemon_of(objects(values))
    config = config_of(daemon, FIELDS)
    needed = config.drain_s + config.disk_save_s + 20
    if values.get("mode") == "sidecar":
        needed += 120
    assert needed < pod["terminationGracePeriodSeconds"] <= needed + 20


def test_engines_depend_on_no_sidecar() -> None:
    """The readiness of a sidecar would count for the pod, and its start would be waited for."""
    _, daemon = daemon_of(objects(example("sidecar")))
    assert daemon["restartPolicy"] == "Always"
    assert not daemon.keys() & {"readinessProbe", "startupProbe"}
    made = objects(example("daemonset"))
    assert one(made, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    assert daemon_of(made)[1]["readinessProbe"]["httpGet"]["path"] == "/ready"


def allowed(policy: Object, direction: str) -> dict[int, list[Any]]:
    """The peers of each port of a policy; an empty list: all."""
    side = {"ingress": "from", "egress": "to"}[direction]
    return {port["port"]: rule.get(side, []) for rule in policy["spec"][direction] for port in rule["ports"]}


def test_who_reaches_a_daemon() -> None:
    policy = one(objects(example("daemonset")), "NetworkPolicy")
    incoming, outgoing = allowed(policy, "ingress"), allowed(policy, "egress")
    assert incoming.keys() == {7440, 7441, 7442}
    assert all(incoming.values())
    assert outgoing.keys() == {53, 2379, 7440, 7442}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    beside = one(objects(example("sidecar")), "NetworkPolicy")
    assert allowed(beside, "ingress").keys() == {7440, 7441, 7442, 8000}
    assert beside["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://collector:4318", 4318), ("https://collector/v1/traces", 443), ("http://[fd00::1]:4318/", 4318)],
)
def test_a_daemon_reaches_its_collector(url: str, port: int) -> None:
    policy = one(objects(example("daemonset") | {"settings": {"otlp": url}}), "NetworkPolicy")
    assert allowed(policy, "egress").keys() == {53, 2379, 7440, 7442, port}


@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_vllm_is_given_settings_that_the_connector_has(name: str) -> None:
    (container,) = [
        each for _, pod in pods(objects(example(name))) for each in pod["containers"] if each["name"] == "vllm"
    ]
    (flag,) = [each for each in container["args"] if each.startswith("--kv-transfer-config=")]
    config = json.loads(flag.partition("=")[2])
    assert config["kv_connector_extra_config"].keys() <= settings_of(EngineSettings).keys()
    assert (ROOT / "client" / config["kv_connector_module_path"].replace(".", "/") / "__init__.py").exists()
    assert (
        config["kv_connector_extra_config"]["socket"]
        == environment(daemon_of(objects(example(name)))[1], FIELDS)["TOKENLAKE_SOCKET"]
    )


def test_certificates_are_what_nodes_ask_for() -> None:
    made = objects(example("daemonset"))
    for node in ("gpu-1", "gpu-2"):
        spec = one(made, "Certificate", node)["spec"]
        assert spec["uris"] == [f"spiffe://tokenlake/tokenlake/node/{node}"]
        assert spec["commonName"] == node
        assert set(spec["usages"]) == {"digital signature", "server auth", "client auth"}
        assert spec["issuerRef"]["name"] == one(made, "Issuer", "tokenlake")["metadata"]["name"]
    pod, _ = daemon_of(made)
    (volume,) = [each for each in pod["volumes"] if each["name"] == "certificates"]
    mounted = {each["secret"]["name"] for each in volume["projected"]["sources"]}
    assert mounted == {one(made, "Certificate", node)["spec"]["secretName"] for node in ("gpu-1", "gpu-2")}


def test_rules_and_metrics_meet() -> None:
    """The rules of the chart are those of `deploy/prometheus`, and expect the job that the monitor gives."""
    made = objects(example("daemonset"))
    rules = yaml.safe_load((CHART.parents[1] / "prometheus" / "rules.yml").read_text())
    assert one(made, "PrometheusRule")["spec"] == rules
    monitor = one(made, "ServiceMonitor", NAMESPACE)
    service = one(made, "Service", NAMESPACE)
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "tokenlake"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    others = [each for each in made if each["kind"] == "Service" and each is not service]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert not [each for each in others if wanted <= each["metadata"]["labels"].items()]
    for each in (monitor, one(made, "ServiceMonitor", f"{NAMESPACE}-engine")):
        (endpoint,) = each["spec"]["endpoints"]
        assert {"targetLabel": "cluster", "replacement": "tokenlake"} in endpoint["relabelings"]


def test_a_user_of_openshift() -> None:
    """Helm shows whole numbers from a million on as 1e+06."""
    pod, daemon = daemon_of(objects(VARIANTS["settings"]))
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000650000
    assert environment(daemon, FIELDS)["TOKENLAKE_ALLOW_UIDS"] == "10001,1000650000"
    assert environment(daemon, FIELDS)["TOKENLAKE_LEASE_S"] == "2.5"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_kustomize_builds_on_the_manifests(name: str, tmp_path: Path) -> None:
    """An overlay of a user's own, which changes the namespace and the image."""
    shutil.copytree(MANIFESTS / name, tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [base]\nnamespace: llm\nimages: [{name: tokenlake, newName: registry.example/tokenlake}]\n"
    )
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    made = [each for each in yaml.safe_load_all(built) if each]
    assert len(made) == len(objects(example(name)))
    assert daemon_of(made)[1]["image"] == f"registry.example/tokenlake:{stated()}"
    assert {each["metadata"].get("namespace", "llm") for each in made} == {"llm"}
