"""`python -m tests.page.cost` measures what viewers of the page cost a daemon: the processor time of its process with
ten pollers, which ask every 2 s as the page does, and without."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

from tests.operator.scene import control_of
from tests.page.load import Load, three_nodes
from tests.page.scene import get
from tests.server.scene import private
from tokenlake_client.control import Control
from tokenlake_testing.cluster import Cluster, Node

POLL_S = 2.0


def processor_s(node: Node) -> float:
    """Processor seconds of the daemon so far."""
    assert node.process is not None
    fields = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(node: Node, viewers: int, seconds: float, tokens: list[str]) -> tuple[float, int, int]:
    """The share of a core that the daemon takes for `seconds`; the answers, and the bytes of the last one."""
    ended = threading.Event()
    answers: list[int] = []

    def view(number: int) -> None:
        ended.wait(POLL_S * number / max(1, viewers))
        while not ended.is_set():
            answer = get(node.metrics_port, token=tokens[number], Accept_Encoding="gzip")
            assert answer.status == 200, answer.body
            answers.append(len(answer.body))
            ended.wait(POLL_S)

    threads = [threading.Thread(target=view, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(POLL_S)
    before, began = processor_s(node), time.monotonic()
    time.sleep(seconds)
    used = (processor_s(node) - before) / (time.monotonic() - began)
    ended.set()
    for thread in threads:
        thread.join()
    return used, len(answers), answers[-1] if answers else 0


def measure(what: str, node: Node, arguments: argparse.Namespace, tenants: list[str]) -> None:
    """Print the lines of one daemon. `tenants`: those for which viewers have tokens in turn; empty: for all."""
    with Control.local(control_of(node)) as control:
        tokens = [control.grant_page(tenant=tenants[at % len(tenants)]).token for at in range(arguments.viewers)]
    for viewers in (0, arguments.viewers, 0, arguments.viewers):
        used, answers, nbytes = share(node, viewers, arguments.seconds, tokens)
        print(
            f"{what}, {viewers} viewers: {100 * used:.2f} % of a core, {answers} answers of {nbytes:,} bytes",
            flush=True,
        )


def main() -> None:
    """Measure an idle node, one with 1,000 tenants, and viewers of ten tenants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, three_nodes(Path(directory)) as cluster:
        load = Load(cluster, requests_per_s=20.0)
        time.sleep(30)
        load.close()
        measure("3 nodes, 4 tenants", cluster.nodes[0], arguments, [""])
        measure(
            "the same, each viewer of a tenant", cluster.nodes[0], arguments, ["chat", "search", "documents", "trial"]
        )
    with tempfile.TemporaryDirectory() as directory:
        text = f'cluster_secret = "{"cc" * 32}"\n'
        for number in range(1000):
            text += f'[[tenants]]\nname = "tenant-{number}"\nsecret = "{number:04x}{"aa" * 30}"\nquota = 0.1\n'
        with Cluster(1, "64MiB", "1MiB", config=private(Path(directory) / "tenants.toml", text)) as one:
            measure("1,000 tenants", one.nodes[0], arguments, [""])


if __name__ == "__main__":
    main()
