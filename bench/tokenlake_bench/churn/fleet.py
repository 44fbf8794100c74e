"""The daemons of a churn run, their etcd, and the changes that they go through."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Literal, Self

from tokenlake.errors import Unreachable
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.cluster import Node
from tokenlake_testing.etcd import EtcdServers
from tokenlake_testing.ports import reserve_port

Change = Literal["join", "drain", "kill", "return", "etcd-down"]

MEMORY: Final = 64 << 20
"""Bytes of a daemon's memory: a run evicts nothing, so that a segment that is not found was lost by the change."""
SETTLE_S: Final = 60.0
"""Seconds within which the nodes come to the state that a change leads to."""
CLUSTER: Final = "churn"


class Fleet:
    """The daemons of one run. A context manager: starts etcd and the daemons, and ends them."""

    def __init__(self, names: list[str], *, encrypt: bool) -> None:
        """`names`: of the nodes that run from the beginning."""
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-churn-")
        self._path = Path(self._directory.name)
        self._encrypt = encrypt
        self._etcd = EtcdServers()
        self.nodes = {name: self._make(name) for name in names}

    def __enter__(self) -> Self:
        try:
            self._etcd.__enter__()
            if self._encrypt:
                init_ca(self._path, CLUSTER)
            for node in self.nodes.values():
                self._start(node)
            self.wait_connected()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, name: str) -> Node:
        settings = {
            "memory": str(MEMORY),
            "region-size": "4MiB",
            "listen": f"127.0.0.1:{reserve_port()}",
            "etcd": self._etcd.endpoints,
            "cluster": CLUSTER,
            "drain-s": "30",
        }
        if self._encrypt:
            files = {"certificate": f"{name}.pem", "key": f"{name}-key.pem", "ca": "ca.pem"}
            settings |= {setting: str(self._path / file) for setting, file in files.items()}
        return Node(name, self._path, settings)

    def _start(self, node: Node) -> None:
        if self._encrypt and not Path(node.settings["certificate"]).exists():
            issue(self._path, node.name)
        node.start()

    # -- changes

    def begin(self, change: Change, name: str) -> None:
        """Begin a change of the node `name`; `etcd-down` kills etcd."""
        if change == "etcd-down":
            self._etcd.kill()
        elif change in ("join", "return"):
            if name not in self.nodes:
                self.nodes[name] = self._make(name)
            self._start(self.nodes[name])
        elif change == "drain":
            process = self.nodes[name].process
            assert process is not None
            process.terminate()
        else:
            self.nodes[name].kill()

    def end(self, change: Change) -> None:
        """End the change where it does not end by itself: start etcd again."""
        if change == "etcd-down":
            self._etcd.restart()

    def wait_settled(self, change: Change, name: str) -> None:
        """Wait until a node that drains has ended, or one that joins or returns is connected with all others. Raises
        Unreachable after `SETTLE_S`."""
        if change == "drain":
            process = self.nodes[name].process
            assert process is not None
            try:
                status = process.wait(SETTLE_S)
            except subprocess.TimeoutExpired:
                raise Unreachable(f"{name} did not end: {self.nodes[name].log.read_text()[-2000:]}") from None
            if status:
                raise Unreachable(f"{name} ended with status {status}: {self.nodes[name].log.read_text()[-2000:]}")
        self.wait_connected()

    def wait_connected(self) -> None:
        """Wait until every running daemon is connected with all others that run. Raises Unreachable after
        `SETTLE_S`."""
        running = [node for node in self.nodes.values() if node.running]
        until = time.monotonic() + SETTLE_S
        for node in running:
            while True:
                with contextlib.suppress(OSError):
                    if node.metrics()["tokenlake_peers_connected"] >= len(running) - 1:
                        break
                if not node.running or time.monotonic() > until:
                    raise Unreachable(f"{node.name} is not connected: {node.log.read_text()[-2000:]}")
                time.sleep(0.02)

    def total(self, metric: str) -> float:
        """A counter without labels, summed over the daemons that run."""
        return sum(node.metrics().get(metric, 0.0) for node in self.nodes.values() if node.running)

    def close(self) -> None:
        """End the daemons and etcd, and remove their files."""
        for node in self.nodes.values():
            if node.running:
                node.kill()
        self._etcd.close()
        self._directory.cleanup()
