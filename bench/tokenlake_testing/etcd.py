"""A real etcd on this machine, of one or more members, as child processes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from tokenlake.errors import Unreachable
from tokenlake_testing.children import start_child
from tokenlake_testing.ports import reserve_port

START_S = 30.0


def etcd_version() -> str | None:
    """The version of the installed etcd; None where there is none."""
    if shutil.which("etcd") is None:
        return None
    text = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True).stdout
    return text.partition("etcd Version: ")[2].partition("\n")[0]


class TlsFiles(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path
    ca: Path


class EtcdServers:
    """The members of one etcd cluster. A context manager: starts them and waits until they have a leader, and ends them
    at the exit. Data outlive `kill` and `start`."""

    def __init__(self, members: int = 1, files: TlsFiles | None = None, **flags: str) -> None:
        """`files`: with them clients must use TLS and show a certificate. `flags`: further flags, with underscores."""
        self._files = files
        self._flags = {name.replace("_", "-"): value for name, value in flags.items()}
        self._context = None
        if files is not None:
            self._context = ssl.create_default_context(cafile=files.ca)
            self._context.load_cert_chain(files.certificate, files.key)
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-etcd-")
        self.ports = [reserve_port() for _ in range(members)]
        self._peer_ports = [reserve_port() for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        """The value of the setting `etcd`."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def __enter__(self) -> EtcdServers:
        try:
            for member in range(len(self.ports)):
                self.start(member)
            self.wait_leader()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, member: int) -> None:
        """Start one member."""
        own, peer = self._url(member), f"http://127.0.0.1:{self._peer_ports[member]}"
        cluster = ",".join(f"m{at}=http://127.0.0.1:{port}" for at, port in enumerate(self._peer_ports))
        flags = {
            "name": f"m{member}",
            "data-dir": str(Path(self._directory.name) / f"m{member}"),
            "listen-client-urls": own,
            "advertise-client-urls": own,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            **self._flags,
        }
        if self._files is not None:
            flags |= {"cert-file": str(self._files.certificate), "key-file": str(self._files.key)}
            flags |= {"trusted-ca-file": str(self._files.ca)}
        command = ["etcd", *(word for name, value in flags.items() for word in (f"--{name}", value))]
        if self._files is not None:
            command.append("--client-cert-auth")
        with (Path(self._directory.name) / f"m{member}.log").open("ab") as log:
            self._processes[member] = start_child(command, stdout=log, stderr=log)

    def wait_leader(self) -> int:
        """Wait until the members have a leader. Returns its number."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            for member in range(len(self.ports)):
                with contextlib.suppress(OSError):
                    page = self._page(member, "/metrics")
                    if "\netcd_server_is_leader 1" in page:
                        return member
            time.sleep(0.05)
        raise Unreachable(f"etcd has no leader: {self.log()}")

    def log(self) -> str:
        """The ends of the members' logs."""
        return "\n".join(path.read_text()[-1000:] for path in sorted(Path(self._directory.name).glob("*.log")))

    def _url(self, member: int) -> str:
        return f"http{'s' if self._files is not None else ''}://127.0.0.1:{self.ports[member]}"

    def _page(self, member: int, path: str) -> str:
        with urllib.request.urlopen(self._url(member) + path, timeout=1, context=self._context) as reply:
            return str(reply.read().decode())

    def kill(self, *members: int) -> None:
        """Kill members with SIGKILL; all of them if none is named."""
        for member in members or tuple(self._processes):
            self._processes[member].kill()
            self._processes[member].wait()

    def restart(self) -> None:
        """Start the members that were killed, and wait for a leader."""
        for member, process in self._processes.items():
            if process.poll() is not None:
                self.start(member)
        self.wait_leader()

    def freeze(self, *members: int) -> None:
        """Stop members with SIGSTOP; all of them if none is named."""
        for member in members or tuple(self._processes):
            self._processes[member].send_signal(signal.SIGSTOP)

    def thaw(self, *members: int) -> None:
        """Continue members that are frozen; all of them if none is named."""
        for member in members or tuple(self._processes):
            self._processes[member].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the members and remove their data."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
                process.wait()
        self._directory.cleanup()
