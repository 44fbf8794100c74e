"""The level `restricted` of Kubernetes' Pod Security Standards, which includes `baseline`, as of Kubernetes 1.34.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.chart import Object, containers

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
PROFILES = {"RuntimeDefault", "Localhost"}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}


def violations(pod: Object) -> list[str]:
    """The rules that a pod's specification breaks; none for one that a `restricted` namespace admits."""
    return sorted({*_of_the_pod(pod), *(rule for each in containers(pod) for rule in _of_a_container(pod, each))})


def _of_the_pod(pod: Object) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod.get("volumes", ()):
        for kind in volume.keys() - {"name"} - VOLUMES:
            yield f"volume {kind}"
    for sysctl in pod.get("securityContext", {}).get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"


def _of_a_container(pod: Object, container: Object) -> Iterator[str]:
    own, of_the_pod = container.get("securityContext", {}), pod.get("securityContext", {})
    both = of_the_pod | own
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runAsUser"
    if both.get("seccompProfile", {}).get("type") not in PROFILES:
        yield "seccompProfile"
    if both.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in PROFILES:
        yield "appArmorProfile"
    if both.get("seLinuxOptions", {}).get("type", "") not in SELINUX or both.get("seLinuxOptions", {}).get("user"):
        yield "seLinuxOptions"
    if both.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    hooks = [container.get(name, {}) for name in ("livenessProbe", "readinessProbe", "startupProbe")]
    hooks += list(container.get("lifecycle", {}).values())
    if any(hook.get(kind, {}).get("host") for hook in hooks for kind in ("httpGet", "tcpSocket")):
        yield "host of a probe"
