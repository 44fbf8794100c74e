"""Real daemons on this machine, as child processes: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.opaque_layout import AnyLayout
from tokenlake_client import Pool
from tokenlake_client.deadlines import DEFAULT_DEADLINES
from tokenlake_testing.children import start_child
from tokenlake_testing.fork_server import Process, start_module
from tokenlake_testing.network import Network, in_namespace
from tokenlake_testing.ports import reserve_port

SERVER = "tokenlake_server"
START_S = 60.0
"""Seconds within which a daemon must serve after its start; many, because on a loaded machine an interpreter takes
seconds to start."""
STOP_S = 15.0
PAGE_S = 30.0
"""Seconds within which a daemon must answer for a page; many, because a loaded machine may not run it for seconds."""
DISK_SERVING = "tokenlake_disk_serving{"


class Node:
    """One daemon process. After `kill` it can `start` again under the same name and addresses."""

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: Mapping[str, str],
        module: str = SERVER,
        namespace: str | None = None,
    ) -> None:
        """`settings`: flags of the daemon by name. `module`: the Python module that runs as the daemon. `namespace`:
        the network namespace in which it runs; None for that of this process."""
        self.name = name
        self._module = module
        self._namespace = namespace
        self.socket = directory / f"{name}.sock"
        self.log = directory / f"{name}.log"
        self.metrics_port = reserve_port()
        self.settings = {
            "node": name,
            "socket": str(self.socket),
            "metrics": f"127.0.0.1:{self.metrics_port}",
            **settings,
        }
        """Flags with which every process of the daemon is started, by name."""
        self.process: Process | None = None

    def start(self, module: str | None = None, /, **settings: str) -> None:
        """Start the daemon's process; `Cluster.wait_ready` waits until it serves. `module`, `settings`: for this
        process only."""
        given = {**self.settings, **settings}
        module = module or self._module
        flags = [word for name, value in given.items() for word in (f"--{name}", value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
        # Ctrl-C in a terminal must not end the daemon, because the command that started it may still need it: it has a
        # session of its own.
        with self.log.open("ab") as log:
            if self._namespace is None:
                outputs = {1: log.fileno(), 2: log.fileno()}
                self.process = start_module(module, flags, outputs, environment, new_session=True)
            else:
                words = ["ip", "netns", "exec", self._namespace, sys.executable, "-m", module, *flags]
                self.process = start_child(words, stdout=log, stderr=log, env=environment, start_new_session=True)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL, and wait until the process has ended."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop the daemon's process with SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the daemon's process with SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to the daemon, if it was started; `stop` waits for its end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.terminate()

    def stop(self, within_s: float = STOP_S) -> int:
        """End the daemon with SIGTERM. Returns the exit status; a process that does not end in time is killed."""
        if self.process is None:
            return 0
        self.terminate()
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    @property
    def running(self) -> bool:
        """True if the daemon's process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def page(self, path: str) -> str:
        """Text of a page of the daemon's metrics server: '/metrics', '/health' or '/ready'. A daemon whose control loop
        did not answer in time serves the first two with the status 503, and is asked again."""

        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=PAGE_S) as answer:
                return str(answer.read().decode())

        until = time.monotonic() + PAGE_S
        while True:
            try:
                return read() if self._namespace is None else in_namespace(self._namespace, read)
            except HTTPError as error:
                late = error.code == HTTPStatus.SERVICE_UNAVAILABLE and path != "/ready"
                if not late or time.monotonic() > until:
                    raise
            time.sleep(0.02)

    def wait_disk(self) -> None:
        """Wait until the device of the node's disk tier is in use."""
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if any(name.startswith(DISK_SERVING) and value for name, value in self.metrics().items()):
                    return
            if not self.running or time.monotonic() > until:
                raise Unreachable(f"the disk of {self.name} is not in use: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of the daemon: 'name{label="value",...}' to value."""
        return parse_metrics(self.page("/metrics"))


def node_names(count: int) -> list[str]:
    """The names of the nodes of a `Cluster`; its `Network` has the same."""
    return [f"node{number}" for number in range(count)]


class Cluster:
    """`nodes` daemons on this machine that know each other. A context manager: starts them and waits until they are
    ready, and ends them at the exit."""

    def __init__(
        self,
        nodes: int,
        memory: str,
        region_size: str,
        via: Mapping[tuple[str, str], int] | None = None,
        module: str = SERVER,
        network: Network | None = None,
        /,
        **settings: str,
    ) -> None:
        """`via`: by (node, other), the port at which `node` reaches `other`; without an entry the port of `other`
        itself (`ports`). `module`: see `Node`. `network`: the network of the nodes (`node_names`); None for the
        loopback of this process. `settings`: further flags of every daemon, with underscores."""
        self.deadlines = DEFAULT_DEADLINES
        """Deadlines with which the clients that `connect` opens make their calls."""
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-")
        self.directory = Path(self._directory.name)
        self.ports: dict[str, int] = {}
        """The port at which the daemon of each node listens, by name of the node."""
        self._module, self._network = module, network
        common = {"memory": memory, "region-size": region_size}
        self._common = common | {name.replace("_", "-"): value for name, value in settings.items()}
        self.nodes: list[Node] = []
        for name in node_names(nodes):
            self.add(name)
        if "etcd" in settings:
            return
        hosts = {name: "127.0.0.1" if network is None else network.host(name) for name in self.ports}
        for node in self.nodes:
            own = {node.name: self.ports[node.name]}
            others = [name for name in self.ports if name != node.name]
            reached = self.ports if via is None else own | {other: via[node.name, other] for other in others}
            node.settings.setdefault("peers", ",".join(f"{name}={hosts[name]}:{reached[name]}" for name in self.ports))

    def add(self, name: str) -> Node:
        """A further node, which is not started. It knows the other ones where the setting `etcd` is given."""
        network = self._network
        host = "127.0.0.1" if network is None else network.host(name)
        self.ports[name] = reserve_port()
        settings = {**self._common, "listen": f"{host}:{self.ports[name]}"}
        namespace = None if network is None else network.namespace(name)
        self.nodes.append(Node(name, self.directory, settings, self._module, namespace))
        return self.nodes[-1]

    def give_disks(self, within: Path | None = None, nbytes: int = 0) -> None:
        """Give each node a disk tier of at most `nbytes` (0: the default of the setting); before the start. Its
        directory is made in `within`, which the caller removes (default: among the cluster's files)."""
        for node in self.nodes:
            directory = (within or self.directory).resolve() / f"disk-{node.name}"
            directory.mkdir(mode=0o700)
            node.settings["disk"] = f"{directory}:{nbytes}" if nbytes else str(directory)

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                node.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until every running node serves, with its query engine if it has one, and is connected with every other
        running node."""
        running = [node for node in self.nodes if node.running]
        until = time.monotonic() + START_S
        for node in running:
            while True:
                with contextlib.suppress(OSError):
                    metrics = node.metrics()
                    serves = metrics.get("tokenlake_query_engine_ready", 1.0)
                    prepared = not metrics.get("tokenlake_unprepared_bytes")
                    if metrics["tokenlake_peers_connected"] >= len(running) - 1 and serves and prepared:
                        break
                if not node.running:
                    raise Unreachable(f"{node.name} ended: {node.log.read_text()[-2000:]}")
                if time.monotonic() > until:
                    raise Unreachable(f"{node.name} is not ready: {node.log.read_text()[-2000:]}")
                time.sleep(0.02)

    def connect(self, number: int, layout: AnyLayout) -> Pool:
        """Open a client of the daemon at one node; waits for a daemon that is starting."""
        until = time.monotonic() + START_S
        while True:
            try:
                return Pool.connect(self.nodes[number].socket, layout, deadlines=self.deadlines)
            except Unreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def totals(self) -> dict[str, float]:
        """Metrics of the daemons, summed over the running nodes."""
        total: dict[str, float] = {}
        for node in self.nodes:
            if node.running:
                for name, value in node.metrics().items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def tokens(self) -> dict[str, int]:
        """The tokens of all matches whose leases have ended, over the running nodes: `asked`, and by what became of
        them: `engine_had`, the source of those supplied, the reason of those missed. Without the zeros."""
        counted: dict[str, int] = {}
        labels = {"asked": "", "engine_had": "", "supplied": "source", "missed": "reason"}
        for series, value in self.totals().items():
            for kind, label in labels.items():
                if series.startswith(f"tokenlake_{kind}_tokens_total{{") and value:
                    found = re.search(f'{label}="([^"]*)"', series)
                    name = found[1] if label and found else kind
                    counted[name] = counted.get(name, 0) + int(value)
        return counted

    def close(self) -> None:
        """End all daemons of the cluster at once, and remove their files."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            with contextlib.suppress(TokenLakeError):
                node.stop()
        self._directory.cleanup()


def parse_metrics(page: str) -> dict[str, float]:
    """The values on a page in Prometheus's format: 'name{label="value",...}' to value."""
    return dict(_samples(page))


def _samples(page: str) -> Iterator[tuple[str, float]]:
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)
