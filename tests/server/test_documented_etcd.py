"""The commands of `docs/operations.md` that give etcd TLS and a user, and the settings of the nodes there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.live import wait_until
from tests.server.test_etcd_daemons import Nodes
from tokenlake_testing.children import start_child
from tokenlake_testing.ports import reserve_port

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not all(map(shutil.which, ("etcd", "etcdctl"))), reason="no etcd and etcdctl: make install-tools"
    ),
]


def test_the_etcd_of_the_page_serves_nodes(tmp_path: Path) -> None:
    """Addresses and directories are replaced, and the passwords come from no terminal."""
    page = PAGE.read_text().partition("**With etcd**")[2]
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
