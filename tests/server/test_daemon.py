"""A daemon ends on a signal at any time, its recorded events replay, and no other forges or reads what it writes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    EngineProcess,
    Prompt,
    daemons,
    match,
    read,
    store,
    wait_until,
)
from tests.server.raw import Raw, hello
from tests.server.scene import tenants
from tokenlake.config import load_config
from tokenlake.wire import engine
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena, Region
from tokenlake_server.start.daemon import Daemon
from tokenlake_server.start.running import run
from tokenlake_testing.cluster import Node
from tokenlake_testing.event_log import replay

pytestmark = pytest.mark.live


def test_the_log_of_a_live_run_replays(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    with daemons(2, "2MiB") as cluster:
        for node, log in zip(cluster.nodes, logs, strict=True):
            assert node.stop() == 0
            node.start("tests.recording_daemon", record=str(log))
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as one, cluster.connect(1, LAYOUT) as two:
            for seed in range(30):
                prompt = Prompt(seed, 8)
                store((one, two)[seed % 2], prompt)
                read((two, one)[seed % 2], prompt)
            with EngineProcess(cluster.nodes[0].socket) as process:
                process.ask("match", seed=3, segments=8)
                process.ask("prepare", seed=99, segments=2)
        cluster.nodes[0].freeze()
        with cluster.connect(1, LAYOUT) as two:
            match(two, Prompt(500, 8)).release()
        cluster.nodes[0].thaw()
        cluster.wait_ready()
        for node in cluster.nodes:
            assert node.stop() == 0
    for log in logs:
        replayed = replay(log)
        assert (replayed.difference, replayed.cut_off) == ("", 0)
        assert replayed.events > 100


def test_stopping_in_the_middle_of_transfers() -> None:
    with daemons(2, "48MiB", "4MiB") as cluster:
        prompts = [Prompt(seed, 48) for seed in range(6)]
        with cluster.connect(0, LAYOUT) as writer, cluster.connect(1, LAYOUT) as reader:
            for prompt in prompts:
                store(writer, prompt)
            pending = [reader.engine.begin_match(reader.prefix(prompt.tokens).keys) for prompt in prompts]
            leases = [each.wait() for each in pending]
            channel = reader.link.channel
            for lease in leases:
                channel.begin(lambda number, lease=lease: _fetch(number, lease.ids[0], lease.hits))  # type: ignore[misc]
            for node in cluster.nodes:
                node.terminate()
            assert [node.process.wait(LIMIT_S) for node in cluster.nodes if node.process is not None] == [0, 0]
        for node in cluster.nodes:
            assert "Traceback" not in node.log.read_text(), node.log.read_text()[-3000:]


def _fetch(number: int, lease: int, hits: int) -> engine.Fetch:
    return engine.Fetch(number, lease, 0, hits, 0.0)


async def ran(tmp_path: Path, memory: str, *hooks: Any) -> None:
    """Run a daemon in this process, with functions for `run`, until a signal ends it."""
    text = f'memory = "{memory}"\nsocket = "{tmp_path / "s"}"\nlisten = "127.0.0.1:0"\nmetrics = ""\n'
    config = load_config(toml_text=text, environ={}, flags={}, uid=os.getuid()).config
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await run(config, *hooks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not (tmp_path / "s").exists()


def end(*of: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_while_memory_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon serves while it prepares its memory, and a signal ends it within one step of that."""
    reports: list[tuple[int, int]] = []
    served: list[bool] = []

    def serving(daemon: Daemon) -> None:
        served.append((tmp_path / "s").exists())
        # All memory comes slower than the signal.
        monkeypatch.setattr(Region, "populate", lambda self, ended: waited(ended))

    def waited(ended: Callable[[], bool]) -> None:
        end()
        until = time.monotonic() + LIMIT_S
        while not ended():
            assert time.monotonic() < until

    await ran(tmp_path, "256MiB", serving, lambda *prepared: reports.append(prepared), lambda _: served.append(False))
    assert served == [True]
    assert not reports


async def test_a_part_that_fails_at_the_end_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts behind it are closed, and the memory is given back."""
    freed: list[bool] = []

    class WatchedArena(Arena):
        def free_pages(self, kept: Mapping[int, Sequence[tuple[SlotRef, int]]], left: Collection[int] = ()) -> None:
            super().free_pages(kept, left)
            freed.append(True)

    def ready(daemon: Daemon) -> None:
        def fail() -> None:
            raise OSError("a broken part")

        monkeypatch.setattr(daemon.disk, "stop", fail)
        monkeypatch.setattr(daemon.checker, "close", fail)
        end()

    monkeypatch.setattr("tokenlake_server.start.running.Arena", WatchedArena)
    await ran(tmp_path, "1MiB", ready)
    assert freed == [True]


async def test_a_daemon_ends_while_a_thread_uses_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs in a read from disk keeps a view of its slot."""
    views: list[memoryview] = []

    class UsedArena(Arena):
        def make(self, number: int, nbytes: int) -> None:
            super().make(number, nbytes)
            views.append(self.region(number).view[:4096])

    monkeypatch.setattr("tokenlake_server.start.running.Arena", UsedArena)
    await ran(tmp_path, "1MiB", lambda _: None, lambda *prepared: None, end)
    assert len(views) == 1


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
