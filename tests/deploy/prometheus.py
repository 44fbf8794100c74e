"""A Prometheus that scrapes daemons and the stand-in of an engine, with the rules of `deploy/prometheus`."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.deploy.chart import ROOT
from tests.robustness.live import wait_until
from tokenlake_client.engines.vllm.counters import BUCKETS_S, COUNTS, PREFIX, TIMES
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
PROGRAM = shutil.which("prometheus") or shutil.which("prometheus", path=str(Path(sys.executable).parent))
CLUSTER = "lake"
FASTER = 30
"""The waits of alerts (`for`) are shorter by this factor, so that a test sees what fires in ten minutes."""
SCRAPE_S = 2
OF_VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds")
"""The metrics of vLLM itself that the dashboard uses."""
START_S = 60.0


def _rules() -> str:
    """The rules, evaluated each second, with shorter waits."""
    text = re.sub(r"interval: \w+", "interval: 1s", RULES.read_text())

    def shorter(found: re.Match[str]) -> str:
        return f"for: {60 * int(found[1]) // FASTER}s"

    return re.sub(r"for: (\d+)m$", shorter, text, flags=re.MULTILINE)


class Engine:
    """The stand-in of an engine: a page with the series of vLLM's connector, all declared, and of vLLM itself."""

    LABELS = ("model_name", "engine")

    def __init__(self) -> None:
        registry = CollectorRegistry()
        values = ("m", "0")
        families: dict[str, Counter] = {}
        self._counters: list[Counter] = []
        for count in COUNTS.values():
            if count.metric not in families:
                names = [*self.LABELS, *count.labels]
                families[count.metric] = Counter(PREFIX + count.metric, "-", names, registry=registry)
            self._counters.append(families[count.metric].labels(*values, *count.labels.values()))
        times = [PREFIX + name for name in TIMES] + [name for name in OF_VLLM if name.endswith("_seconds")]
        gauges = [name for name in OF_VLLM if not name.endswith("_seconds")]
        self._histograms = [
            Histogram(name, "-", self.LABELS, buckets=BUCKETS_S, registry=registry).labels(*values) for name in times
        ]
        for name in gauges:
            Gauge(name, "-", self.LABELS, registry=registry).labels(*values).set(1)
        self.port = reserve_port()
        self._registry = registry

    def page(self, _: object, start_response: Callable[..., object]) -> Iterable[bytes]:
        """An application of WSGI: the page, in the text format, as vLLM serves it. All counts grow with each call."""
        for counter in self._counters:
            counter.inc()
        for histogram in self._histograms:
            histogram.observe(0.01)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(self._registry)]


class Prometheus:
    """A process of Prometheus. A context manager."""

    def __init__(self, directory: Path, nodes: Sequence[Node], engine: Engine) -> None:
        self._url = f"http://127.0.0.1:{(port := reserve_port())}"
        daemons = [
            {"targets": [f"127.0.0.1:{node.metrics_port}"], "labels": {"cluster": CLUSTER, "instance": node.name}}
            for node in nodes
        ]
        engines = [{"targets": [f"127.0.0.1:{engine.port}"], "labels": {"cluster": CLUSTER, "instance": "engine"}}]
        configuration = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "tokenlake", "static_configs": daemons},
                {"job_name": "vllm", "static_configs": engines},
            ],
        }
        (directory / "rules.yml").write_text(_rules())
        (directory / "prometheus.yml").write_text(json.dumps(configuration))
        self._log = directory / "prometheus.log"
        self._command = [
            str(PROGRAM),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as log:
            self._process = start_child(self._command, stdout=log, stderr=log)
        try:
            wait_until(self._ready, "Prometheus serves", START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(START_S)
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=START_S) as answer:
            return bool(answer.status == 200)
        return False

    def _asked(self, path: str, **fields: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=START_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{fields}: {error.read().decode()}") from error

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        found: list[dict[str, Any]] = self._asked("query", query=text)["result"]
        return found

    def values(self, label: str, selector: str) -> list[str]:
        """The values of a label of these series."""
        found: list[str] = self._asked(f"label/{label}/values", **{"match[]": selector})
        return found

    def alerts(self) -> set[tuple[str, str]]:
        """The alerts that fire: name and instance of each, the latter empty for alerts of a cluster."""
        return {
            (each["labels"]["alertname"], each["labels"].get("instance", ""))
            for each in self._asked("alerts")["alerts"]
            if each["state"] == "firing"
        }

    def errors(self) -> list[str]:
        """The errors of rules, which their last evaluation had."""
        groups = self._asked("rules")["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] == "err"
        ]

    def evaluations(self) -> int:
        """How often each group of rules was evaluated."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=START_S) as answer:
            page = answer.read().decode()
        return min(
            int(float(found))
            for found in re.findall(r"^prometheus_rule_group_iterations_total\{.*\} (\S+)$", page, re.M)
        )


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def engine_page() -> Iterator[Engine]:
    """The page of an engine, served."""
    engine = Engine()
    with make_server("127.0.0.1", engine.port, engine.page, handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
