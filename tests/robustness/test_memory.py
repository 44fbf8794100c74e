"""The memory of an arena is what `memory` says, over hand-overs and restarts, with engines that stay alive."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, EngineProcess, daemons, pid_of, wait_until
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

MEMORY = 4 << 20
REGION_BYTES = 256 << 10
HEADER_BYTES = 4096
"""Bytes of the header of each region, which are allocated beside `memory`."""
_ARENA = re.compile(r"/memfd:tokenlake-\d+")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)$")


def arena_bytes(pids: Sequence[int]) -> int:
    """The bytes of all regions, also of daemons that have ended, that these processes keep allocated: by a descriptor,
    or by a mapping, of which the resident pages count. The processes are not looked at in the same moment, so that a
    region may be counted together with the one that replaces it: the least of three looks is returned."""
    return min(_look(pids) for _ in range(3))


def _look(pids: Iterable[int]) -> int:
    sizes: dict[int, int] = {}
    for pid in pids:
        for inode, nbytes in [*_by_descriptor(pid), *_by_mapping(pid)]:
            sizes[inode] = max(sizes.get(inode, 0), nbytes)
    return sum(sizes.values())


def _by_descriptor(pid: int) -> Iterable[tuple[int, int]]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if _ARENA.match(str(path.readlink())):
                status = path.stat()
                yield status.st_ino, status.st_blocks * 512


def _by_mapping(pid: int) -> Iterable[tuple[int, int]]:
    inode = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            inode = int(found[1]) if _ARENA.match(found[2]) else 0
        elif inode and line.startswith("Rss:"):
            yield inode, int(line.split()[1]) << 10


def mapped(engine: EngineProcess) -> int:
    """The number of regions that an engine maps."""
    return len(set(_ARENA.findall(Path(f"/proc/{engine.process.pid}/maps").read_text())))


def engines_of(node: Node, engines: Iterable[EngineProcess]) -> list[int]:
    """The pids of the engines and, if it runs, of the daemon."""
    return [*([pid_of(node)] if node.running else []), *(engine.process.pid for engine in engines)]


def test_hand_overs_need_no_further_memory(tmp_path: Path) -> None:
    """One engine of each tenant joins and fills its fair share of the memory."""
    config, regions = tmp_path / "tenants.toml", 12
    names = [f"tenant{number}" for number in range(3)]
    config.touch(0o600)
    config.write_text(
        "".join(
            f"[[tenants]]\nname = '{name}'\nsecret = '{name.encode().hex():0<32}'\ntokens = ['{name:-<20}']\n"
            for name in names
        )
    )
    with contextlib.ExitStack() as stack:
        sizes = (str(regions * REGION_BYTES), str(REGION_BYTES))
        node = stack.enter_context(daemons(1, *sizes, config=str(config), lease_s="1")).nodes[0]
        engines: list[EngineProcess] = []

        def is_within_memory() -> bool:
            return arena_bytes(engines_of(node, engines)) <= regions * (REGION_BYTES + HEADER_BYTES)

        def regions_of(name: str) -> float:
            return node.metrics().get(f'tokenlake_regions{{slot_bytes="16384",tenant="{name}"}}', 0)

        for number, name in enumerate(names):
            engines.append(stack.enter_context(EngineProcess(node.socket, credential=f"{name:-<20}")))
            seeds = itertools.count(1000 * number)
            while regions_of(name) < regions // (number + 1):
                engines[-1].ask("store", seed=next(seeds), segments=16)
                assert is_within_memory()
        # Pages that are locked for a GPU stay allocated as long as they are mapped. An engine is told which regions
        # were given away, and reads this at the latest with its next heartbeat.
        for engine, name in zip(engines, names, strict=True):
            wait_until(lambda engine=engine, name=name: mapped(engine) <= regions_of(name), f"{name} maps only its own")  # type: ignore[misc]
        assert is_within_memory()


def test_a_forked_child_keeps_no_memory() -> None:
    """An engine forks a process that lives longer than the engine and the daemon."""
    with daemons() as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("store", seed=1, segments=20)
        assert engine.ask("match", seed=1, segments=20)["hits"] == 20
        child = engine.ask("fork")["child"]
        try:
            assert arena_bytes([child]) == 0
            engine.ask("release")
            node.kill()
            wait_until(lambda: arena_bytes([child, *engines_of(node, [engine])]) == 0, "no memory is left")
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_arrays_outlive_the_memory_of_the_daemon(end: str) -> None:
    """An engine has arrays in every region. They stay readable, but keep no memory of the daemon that ended."""
    with daemons(1, "4MiB", "256KiB") as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        for seed in range(10):
            engine.ask("store", seed=seed, segments=16)
        assert engine.ask("match", seed=9, segments=16)["hits"] == 16
        if end == "kill":
            node.kill()
        else:
            engine.freeze()
            assert node.stop() == 0
            assert 0 < arena_bytes(engines_of(node, [engine])) <= 16 * (LAYOUT.segment_bytes + 4096)
            engine.thaw()
        wait_until(lambda: arena_bytes(engines_of(node, [engine])) == 0, "no memory is left")
        assert engine.ask("compare") == {"hits": 16, "wrong": 0}
        node.start()
        cluster.wait_ready()
        wait_until(lambda: bool(engine.ask("state")["connected"]), "connected again")
        engine.ask("store", seed=20, segments=16)
        assert engine.ask("compare") == {"hits": 16, "wrong": 0}
        assert arena_bytes(engines_of(node, [engine])) <= MEMORY + 16 * HEADER_BYTES
        engine.ask("release")
        assert engine.ask("match", seed=20, segments=16)["wrong"] == 0
