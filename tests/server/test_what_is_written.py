"""Log lines that no engine can forge, and files that other users cannot read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import LAYOUT, daemons, wait_until
from tests.server.raw import Raw, hello
from tests.server.scene import tenants
from tokenlake.wire import engine
from tokenlake_testing.cluster import Node

FORGED = "2026-11-22 00:00:00,000 ERROR tokenlake_server.start.daemon: forged"


@pytest.mark.live
def test_a_layout_forges_no_line_of_the_log() -> None:
    version, pairs = msgspec.msgpack.decode(LAYOUT.encode())
    layouts = [
        [version, [*pairs, [f"field\n{FORGED}", "value"]]],
        [version, [[name, f"\n{FORGED}" if name == "dtype" else value] for name, value in pairs]],
        [version, [[name, value] if name != "dtype" else [f"\r{FORGED}", value] for name, value in pairs]],
        [version, [*pairs, [f"a\x1b[2Jb\u2028{FORGED}", "value"]]],
        [version, [*pairs, ["x" * 50_000, "value"]]],
    ]
    with daemons() as cluster:
        node = cluster.nodes[0]
        before = len(node.log.read_text())
        for layout in layouts:
            with Raw(node.socket) as raw:
                raw.send(hello(layout=msgspec.msgpack.encode(layout)))
                assert isinstance(raw.reply(), engine.Failed)
                assert raw.closed()
        wait_until(lambda: node.log.read_text().count("refused") >= len(layouts), "all refusals are in the log")
        new = node.log.read_text()[before:]
        assert "forged" in new
        # `splitlines` splits at each character that a terminal or an editor may take for the end of a line.
        assert not [line for line in new.splitlines() if line.startswith(FORGED)]
        assert all(line.isprintable() for line in new.splitlines())
        assert len(new) < 50_000


def test_a_traceback_forges_no_line_of_the_log() -> None:
    """Its lines are indented, those of the exception's text too."""
    program = (
        "import logging, sys\n"
        "from tokenlake.log_lines import set_up_log\n"
        "set_up_log('%(levelname)s %(message)s')\n"
        "try:\n"
        f"    raise ValueError('text\\n{FORGED}')\n"
        "except ValueError:\n"
        f"    logging.exception('failed\\n{FORGED}')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, *rest = ran.stderr.splitlines()
    assert first.startswith("ERROR failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.live
def test_files_of_a_daemon_are_for_its_user_only(tmp_path: Path) -> None:
    with daemons(state_directory=str(tmp_path)) as cluster:
        assert cluster.nodes[0].stop() == 0
    assert _mode(tmp_path / f"orders-{cluster.nodes[0].name}") == 0o600


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.live
def test_a_tenant_with_the_uid_of_the_daemon(tmp_path: Path) -> None:
    """Its processes could open the daemon's descriptors, which have the memory of all tenants: the log warns."""
    with daemons(config=tenants(tmp_path)) as cluster:
        warnings = _warnings(cluster.nodes[0])
        assert len(warnings) == 1
        assert f"uid {os.getuid()}" in warnings[0]
    with daemons(config=tenants(tmp_path, allowed=os.getuid() + 1)) as cluster:
        assert not _warnings(cluster.nodes[0])
    with daemons() as cluster:
        assert not _warnings(cluster.nodes[0])


def _warnings(node: Node) -> list[str]:
    return [line for line in node.log.read_text().splitlines() if "WARNING" in line and "/proc" in line]
