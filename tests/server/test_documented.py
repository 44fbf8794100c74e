"""The configuration files of the pages of operations start a cluster, and their commands give etcd TLS and a user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, Prompt, outcomes, read, store, wait_until
from tests.server.test_etcd_daemons import Nodes
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import parse_metrics
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

PAGES = Path(__file__).parents[2] / "docs" / "operations"


def test_the_two_nodes_of_the_page_connect(tmp_path: Path) -> None:
    """The page's ports and sizes are replaced, since other daemons may have these ports, and the machine less
    memory."""
    files = dict(re.findall(r"```toml\n# ([ab])\.toml\n(.*?)```", (PAGES / "two-nodes.md").read_text(), re.DOTALL))
    assert sorted(files) == ["a", "b"]
    named = set(re.findall(r"127\.0\.0\.1:([0-9]+)", "".join(files.values())))
    ports = {port: str(reserve_port()) for port in named}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    with contextlib.ExitStack() as stack:
        daemons = {}
        for node, text in files.items():
            file = tmp_path / f"{node}.toml"
            file.write_text(re.sub(r"(?<=127\.0\.0\.1:)[0-9]+", lambda match: ports[match[0]], text))
            log = stack.enter_context((tmp_path / f"{node}.log").open("wb"))
            command = [sys.executable, "-m", "tokenlake_server", "--config", str(file), "--memory", "4MiB"]
            # The default path of the socket depends on the user of the test.
            command += ["--socket", str(tmp_path / f"tokenlake-{node}.sock")]
            daemons[node] = stack.enter_context(
                subprocess.Popen([*command, "--region-size", "1MiB"], stdout=log, stderr=log, env=environment)
            )
            stack.callback(daemons[node].kill)

        def connected(node: str) -> bool:
            assert daemons[node].poll() is None, (tmp_path / f"{node}.log").read_text()
            (address,) = re.findall(r'metrics = "(.*)"', (tmp_path / f"{node}.toml").read_text())
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
                return parse_metrics(page.read().decode())["tokenlake_peers_connected"] == 1
            return False

        for node in daemons:
            wait_until(lambda node=node: connected(node), f"{node} found the other")  # type: ignore[misc]
        for seed, node in enumerate(daemons):
            with Pool.connect(tmp_path / f"tokenlake-{node}.sock", LAYOUT, deadlines=PATIENT) as pool:
                prompt = Prompt(seed, 3)
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
                assert read(pool, prompt) == 3
        for daemon in daemons.values():
            daemon.terminate()
            assert daemon.wait(LIMIT_S) == 0


@pytest.mark.skipif(not all(map(shutil.which, ("etcd", "etcdctl"))), reason="no etcd and etcdctl: make install-tools")
def test_the_etcd_of_the_page_serves_nodes(tmp_path: Path) -> None:
    """Addresses and directories are replaced, and the passwords come from no terminal."""
    page = (PAGES / "two-machines.md").read_text().partition("## The members in etcd")[2]
    commands = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    ca, serve, users = (
        next(text for text in commands if begin in text) for begin in ("ca init", "etcd --data-dir", "etcdctl")
    )
    (settings,) = re.findall(r"```toml\n(etcd = .*?)```", page, re.DOTALL)[:1]
    port, peer = reserve_port(), reserve_port()
    own, nodes_own = tmp_path / "etcd", tmp_path / "tokenlake"

    def here(text: str) -> str:
        text = text.replace("10.0.0.9:2379", f"127.0.0.1:{port}").replace("10.0.0.9", "127.0.0.1")
        text = text.replace("/etc/etcd", str(own)).replace("/etc/tokenlake", str(nodes_own))
        return text.replace("/var/lib/etcd", str(tmp_path / "data"))

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENLAKE_", "ETCD"))}
    environ["PATH"] = path

    def run(text: str) -> None:
        script = ["bash", "-e", "-c", here(text)]
        done = subprocess.run(
            script, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

    run(ca)
    for directory in (own, nodes_own):
        directory.mkdir()
    for name in ("etcd.pem", "etcd-key.pem", "ca.pem"):
        shutil.copy(tmp_path / "etcd-ca" / name, own)
    shutil.copy(own / "ca.pem", nodes_own / "etcd-ca.pem")
    peers = f"--listen-peer-urls http://127.0.0.1:{peer} --initial-advertise-peer-urls http://127.0.0.1:{peer}"
    peers += f" --initial-cluster default=http://127.0.0.1:{peer}"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "etcd.log").open("ab"))
        command = ["bash", "-c", f"exec {here(serve).strip()} {peers}"]
        etcd = start_child(command, env=environ, stdout=log, stderr=log)
        stack.callback(etcd.wait)
        stack.callback(etcd.kill)
        wait_until(lambda: "serving client requests" in (tmp_path / "etcd.log").read_text(), "etcd serves")
        run(re.sub(r"user add (\S+)", r"user add --interactive=false \1 <<< password", users))
        file = tmp_path / "nodes.toml"
        file.write_text(here(settings).replace('"..."', '"password"'))
        file.chmod(0o600)
        made = Nodes(tmp_path, f"127.0.0.1:{port}")
        for name in "ab":
            made.start(name, config=str(file))
            stack.callback(made.nodes[name].kill)
        made.wait("a", "b")
        # A program without the password cannot change the ring.
        delete = re.findall(r"export .*\n", users)[0] + "etcdctl del --prefix /tokenlake/ && exit 1 || exit 0"
        run(delete)
