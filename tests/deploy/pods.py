"""Pods on this machine: the containers of a specification in namespaces of their own, with the mounts, users, groups
and rights that Kubernetes gives them. `missing` tells what this machine lacks for them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.chart import ROOT, Object, environment
from tests.robustness.live import LIMIT_S, wait_until
from tokenlake_testing import network
from tokenlake_testing.children import start_child
from tokenlake_testing.network import Network

COMMAND = [sys.executable, "-c", "from tokenlake.command import main; main()"]
PROGRAMS = sorted(
    {sys.base_prefix, os.path.realpath(sys.prefix), sys.prefix, str(ROOT), *filter(os.path.isdir, sys.path)}
)
"""What the image has: the interpreter, the packages and the code."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "PYTHONDONTWRITEBYTECODE": "1",
}


@functools.cache
def missing() -> str | None:
    """The reason for which this machine can make no pods, to skip a test; None if it can."""
    for program in ("unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"pods need the program '{program}' (util-linux)"
    if (reason := network.missing()) is not None:
        return reason
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], check=False)
    return "this machine allows no namespaces of mounts" if tried.returncode else None


def secret_volume(place: Path, contents: Mapping[str, str], group: int, mode: int = 0o440) -> None:
    """The files of a Secret as kubelet writes them: of root and `fsGroup`, behind symbolic links, so that all change at
    once. Called again, it changes them."""
    place.mkdir(exist_ok=True)
    number = sum(each.name.startswith("..2") for each in place.iterdir())
    data = place / f"..2026_{number}"
    for name, text in contents.items():
        file = data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        os.chown(file, 0, group)
        top = place / name.split("/")[0]
        if not top.is_symlink():
            top.symlink_to(f"..data/{top.name}")
    for directory in (data, *(each for each in data.rglob("*") if each.is_dir())):
        directory.chmod(0o2755)
        os.chown(directory, 0, group)
    (place / "..new").symlink_to(data.name)
    (place / "..new").rename(place / "..data")


class Pod:
    """A pod, whose volumes are below `directory`. A context manager that ends its containers."""

    def __init__(
        self,
        spec: Object,
        name: str,
        world: Network,
        directory: Path,
        *,
        hosts: str = "",
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        machine: Path | None = None,
    ) -> None:
        """`secrets`: by the name of a volume, its files. `machine`: the root directory of the machine, for hostPath."""
        self._spec, self.name, self._network, self._directory = spec, name, world, directory
        self._hosts = f"127.0.0.1 localhost\n{hosts}"
        self.security = spec["securityContext"]
        self.grace_s: float = spec.get("terminationGracePeriodSeconds", 30)
        """Seconds from SIGTERM to SIGKILL."""
        self.volumes: dict[str, Path] = {}
        self._in_memory: set[str] = set()
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        directory.mkdir(parents=True)
        group = self.security["fsGroup"]
        for volume in spec["volumes"]:
            place = self.volumes[volume["name"]] = directory / volume["name"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                self._in_memory.add(volume["name"])
            elif "emptyDir" in volume:
                place.mkdir()
                place.chmod(0o2777)
                os.chown(place, 0, group)
            elif "hostPath" in volume:
                assert machine is not None
                place = self.volumes[volume["name"]] = machine / volume["hostPath"]["path"].lstrip("/")
                if volume["hostPath"]["type"] == "DirectoryOrCreate":
                    place.mkdir(parents=True, exist_ok=True)
                    place.chmod(0o755)
            else:
                secret_volume(place, (secrets or {})[volume["name"]], group)

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _identity(self, container: Object) -> list[str]:
        """The user, the groups and the rights of a container."""
        context = self.security | container.get("securityContext", {})
        added = [f"+{name.lower()}" for name in context["capabilities"].get("add", ())]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["allowPrivilegeEscalation"] is False
        return [
            *("setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"),
            *(f"--groups={context['fsGroup']}", "--no-new-privs", f"--bounding-set={','.join(['-all', *added])}"),
        ]

    def _environment(self, container: Object) -> dict[str, str]:
        fields = {"metadata.name": self.name, "spec.nodeName": self.name, "status.podIP": self._network.host(self.name)}
        return ENVIRONMENT | environment({"env": [], **container}, fields)

    def start(self, container: Object, command: Sequence[str], log: Path) -> None:
        """Start a container with its mounts, variables, user and rights. `command`: in place of that of its image."""
        root = self._directory / f"root-{container['name']}"
        root.mkdir(exist_ok=True)
        mounts = [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]]
        wanted = {
            "root": str(root),
            "programs": PROGRAMS,
            "binds": [(str(self.volumes[name]), path) for name, path in mounts if name not in self._in_memory],
            "memory": [path for name, path in mounts if name in self._in_memory],
            "hosts": self._hosts,
            "command": [*self._identity(container), *command],
            "environment": self._environment(container),
        }
        inside = [sys.executable, str(Path(__file__).with_name("inside.py")), json.dumps(wanted)]
        apart = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        with log.open("ab") as output:
            self._processes[container["name"]] = start_child(
                ["ip", "netns", "exec", self._network.namespace(self.name), *apart, *inside],
                stdout=output,
                stderr=output,
            )

    def pid(self, name: str) -> int:
        """The process 1 of a container, by the number that this machine knows."""
        outer = self._processes[name].pid
        file = Path(f"/proc/{outer}/task/{outer}/children")
        wait_until(lambda: bool(file.read_text().split()), f"the container {name} has a process")
        return int(file.read_text().split()[0])

    def wait(self, name: str, limit_s: float = LIMIT_S) -> int:
        """The status of a container that ends."""
        return self._processes[name].wait(limit_s)

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def run_in(self, container: Object, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """What `kubectl exec` does: run a command in a container."""
        target = f"--target={self.pid(container['name'])}"
        entered = ["nsenter", target, "--mount", "--pid", "--net", "--root", "--wd=/"]
        return subprocess.run(
            [*entered, *self._identity(container), *command],
            env=self._environment(container),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def page(self, path: str) -> tuple[int, str]:
        """The status and the content of a page that kubelet asks for; 0 where nothing answers."""

        def read() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://{self._network.host(self.name)}:7441{path}", timeout=2) as reply:
                    return reply.status, reply.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        with contextlib.suppress(RuntimeError):
            return self._network.inside(self.name, read)
        return 0, ""
