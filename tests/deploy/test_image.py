"""The image, built from Debian's packages and PyPI, and run with the rights that the chart gives it; the unit of
systemd, run by systemd in a container. Needs root, some minutes, and 2 GB below the directory of temporary files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import ROOT
from tests.robustness.live import wait_until

TOOLS = ("mmdebstrap", "buildah", "podman", "runc")
LACKS = [name for name in TOOLS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.live,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(LACKS), reason=f"not installed: {', '.join(LACKS)} (apt-get install)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="an image is built as root"),
    pytest.mark.skipif(
        not Path("/sys/fs/cgroup/memory").is_dir(),
        reason="written for cgroups of version 1, which this machine has not",
    ),
]
MIRRORS = [
    "deb http://deb.debian.org/debian bookworm main",
    "deb http://deb.debian.org/debian-security bookworm-security main",
]
SLOW_S = 120.0
"""A container with a systemd of its own takes seconds to start, and many on a busy machine."""
MOST_BYTES = 150 << 20
OWN_CAS = Path("/usr/local/share/ca-certificates")
RESTRICTED = ["--read-only", "--tmpfs=/tmp:mode=1777", "--cap-drop=all", "--security-opt=no-new-privileges"]
ORPHAN = "import os, time; os.fork() or os.fork() or time.sleep(0.2)"
"""Leaves a process whose parent has ended, and that ends later."""
STATES = "import pathlib; print([p.read_text().split()[1:3] for p in pathlib.Path('/proc').glob('[0-9]*/stat')])"


def run(*command: str, limit_s: float = 600) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return ended.stdout


class Engine:
    """buildah and podman with a storage of their own."""

    def __init__(self, place: Path) -> None:
        self._storage = [f"--root={place}/root", f"--runroot={place}/run", "--storage-driver=vfs"]
        # podman would raise the limits of this process, which it may not do on every machine.
        self._options = ["--network=host", *(f"--ulimit={name}=4096:4096" for name in ("nofile", "nproc"))]
        self._running: list[str] = []

    def buildah(self, *words: str) -> str:
        return run("buildah", *self._storage, *words).strip()

    def podman(self, *words: str) -> str:
        return run("podman", *self._storage, "--cgroup-manager=cgroupfs", "--runtime=runc", *words).strip()

    def start(self, image: str, *options: str) -> str:
        """The name of a new container."""
        name = self.podman("run", "--detach", *self._options, *options, image)
        self._running.append(name)
        return name

    def output(self, image: str, *options: str, arguments: Sequence[str]) -> str:
        """What a container prints."""
        return self.podman("run", "--rm", *self._options, *options, image, *arguments)

    def close(self) -> None:
        for name in self._running:
            self.podman("rm", "--force", "--time=1", name)


def build(engine: Engine, file: Path, tag: str, *options: str) -> None:
    """Certificates of the machine's own authorities serve while the image is built, as in a company's network."""
    volume = [f"--volume={OWN_CAS}:{OWN_CAS}:ro"] if OWN_CAS.is_dir() else []
    words = ["build", "--isolation=chroot", "--network=host", *volume, *options, f"--file={file}", f"--tag={tag}"]
    engine.buildah(*words, str(ROOT))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With the image `localhost/tokenlake`, on a base that mmdebstrap makes: no registry is needed."""
    place = tmp_path_factory.mktemp("image")
    made = Engine(place)
    base = place / "base.tar"
    slim = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "locale", "man")]
    run("mmdebstrap", "--variant=minbase", *slim, "bookworm", str(base), *MIRRORS)
    container = made.buildah("from", "scratch")
    made.buildah("add", container, str(base), "/")
    made.buildah("commit", container, "localhost/debian:bookworm-slim")
    base.unlink()
    file = ROOT / "deploy" / "image" / "Containerfile"
    build(made, file, "localhost/tokenlake", "--build-arg=BASE=localhost/debian:bookworm-slim")
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(place, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def settings(**more: Any) -> list[str]:
    given = {"listen": "127.0.0.1:0", "memory": "64MiB", "socket": "/run/tokenlake/tokenlake-local.sock", **more}
    return [f"--env=TOKENLAKE_{name.upper()}={value}" for name, value in given.items()]


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(json.loads(reply.read())["healthy"])
    except OSError:
        return False


def test_size(engine: Engine, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    engine.buildah("push", "--quiet", "localhost/tokenlake", f"oci-archive:{archive}")
    print(f"{archive.stat().st_size / 1e6:.0f} MB compressed")
    assert archive.stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    "user", [[], ["--user=1000650000:0"]], ids=["the user of the image", "a user that no file names"]
)
def test_a_daemon_without_rights(user: Sequence[str], engine: Engine, tmp_path: Path) -> None:
    """On a read-only file system, in a cgroup, with the seccomp profile of podman; process 1 takes the status of
    orphans and passes SIGTERM on."""
    shared = tmp_path / "volume"
    shared.mkdir()
    shared.chmod(0o2777)
    port = free_port()
    limits = ["--memory=400m", "--pids-limit=200"]
    name = engine.start(
        "localhost/tokenlake",
        *[*RESTRICTED, *limits, *user, f"--volume={shared}:/run/tokenlake"],
        *settings(metrics=f"127.0.0.1:{port}"),
    )
    wait_until(lambda: healthy(port), "the daemon serves")
    assert "no problem was found" in engine.podman("exec", name, "tokenlake", "status")
    engine.podman("exec", name, "python3", "-c", ORPHAN)

    def no_orphan() -> bool:
        found = engine.podman("exec", name, "python3", "-c", STATES)
        return "(tini)" in found and found.count("python3") == 1

    wait_until(no_orphan, "the orphan has ended, and its status is taken")
    engine.podman("stop", "--time=10", name)
    assert engine.podman("inspect", "--format={{.State.ExitCode}}", name) == "0"


def test_no_shell_is_needed(engine: Engine) -> None:
    assert "tokenlake" in engine.output("localhost/tokenlake", *RESTRICTED, arguments=["--version"])
    (config,) = json.loads(engine.podman("inspect", "localhost/tokenlake"))
    assert config["Config"]["Entrypoint"] == ["/usr/bin/tini", "--", "tokenlake"]
    assert config["Config"]["Cmd"] == ["serve"]
    assert config["User"] == "10001:10001"


SYSTEMD = """
FROM localhost/tokenlake
USER 0
ENV PATH=/opt/tokenlake/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get update && apt-get install --yes --no-install-recommends systemd systemd-sysv dbus && \
    useradd --system --uid 990 tokenlake && mkdir /etc/tokenlake /etc/systemd/system/tokenlake.service.d && \
    printf '[Service]\\nWatchdogSec=15\\n' > /etc/systemd/system/tokenlake.service.d/short.conf && \
    printf 'memory = "64MiB"\\nlisten = "127.0.0.1:0"\\nmetrics = ""\\n' > /etc/tokenlake/tokenlake.toml
COPY deploy/systemd/tokenlake.service /etc/systemd/system/
RUN systemctl enable tokenlake
ENTRYPOINT ["/sbin/init"]
"""


def test_systemd_runs_the_unit(engine: Engine, tmp_path: Path) -> None:
    """With all that the unit takes away; a daemon whose loop stands still is ended and started again, with the memory
    of the one before."""
    file = tmp_path / "Containerfile"
    file.write_text(SYSTEMD)
    build(engine, file, "localhost/systemd")
    name = engine.start("localhost/systemd", "--systemd=always", "--privileged", "--user=0")

    def shown(*names: str) -> list[str]:
        words = ["systemctl", "show", "--value", *(f"--property={each}" for each in names), "tokenlake"]
        try:
            return engine.podman("exec", name, *words).split("\n")
        except AssertionError:
            return []

    def kept() -> int:
        log = engine.podman("exec", name, "journalctl", "--unit=tokenlake", "--no-pager")
        return log.count("64MiB of memory of the daemon before are kept")

    wait_until(lambda: shown("ActiveState") == ["active"], "systemd has heard READY=1", SLOW_S)
    wait_until(lambda: shown("StatusText")[0].startswith("serves at /run/tokenlake/"), "the status is shown", SLOW_S)
    (restarts,) = shown("NRestarts")
    (process,) = shown("MainPID")
    status = engine.podman("exec", name, "cat", f"/proc/{process}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["Seccomp"], fields["NoNewPrivs"], fields["CapBnd"]) == ("2", "1", "0" * 16)
    assert "no problem was found" in engine.podman("exec", name, "tokenlake", "status", "--daemon-uid", "990")
    engine.podman("exec", name, "systemctl", "kill", "--signal=STOP", "tokenlake")
    wait_until(lambda: shown("NRestarts") not in ([restarts], []), "the watchdog has ended it", SLOW_S)
    wait_until(lambda: shown("ActiveState") == ["active"], "it is started again", SLOW_S)
    assert kept() == 1, "systemd has kept the memory of the daemon that it ended"
    engine.podman("exec", name, "systemctl", "restart", "tokenlake")
    wait_until(lambda: shown("ActiveState") == ["active"], "it has restarted", SLOW_S)
    assert kept() == 2
    engine.podman("exec", name, "systemctl", "stop", "tokenlake")
    assert shown("Result", "ExecMainStatus") == ["success", "0"]
