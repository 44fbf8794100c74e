"""The memory of an arena is what `memory` says, over hand-overs and restarts, with engines that stay alive."""

from __future__ import annotations

import contextlib
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


def hand_overs(tenants: int, directory: Path) -> tuple[int, int, int]:
    """Let one engine of each tenant join and fill its fair share of the memory. Returns (regions that were handed over,
    the setting `memory` and the headers of the regions, the largest size of the arena), in bytes."""
    config = directory / "tenants.toml"
    config.touch(0o600)
    config.write_text("".join(_TENANT.format(number=number) for number in range(tenants)))
    regions = 4 * tenants
    moved, largest, memory = 0, 0, regions * REGION_BYTES
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(daemons(1, str(memory), str(REGION_BYTES), config=str(config), lease_s="1")).nodes[0]
        engines: list[EngineProcess] = []
        for number in range(tenants):
            engine = stack.enter_context(EngineProcess(node.socket, credential=_token(number)))
            engines.append(engine)
            share = regions if number == 0 else regions // (number + 1)
            seed = 0

            def has_its_share(engine: EngineProcess = engine, number: int = number, share: int = share) -> bool:
                nonlocal seed, largest
                seed += 1
                engine.ask("store", seed=1000 * number + seed, segments=16)
                largest = max(largest, arena_bytes(engines_of(node, engines)))
                return node.metrics().get(_regions(number), 0) >= share

            wait_until(has_its_share, f"tenant {number} has {share} regions", 120)
            moved += share if number else 0
        # Pages that are locked for a GPU stay allocated as long as they are mapped. An engine is told which regions
        # were given away, and reads this at the latest with its next heartbeat.
        for number, engine in enumerate(engines):
            wait_until(
                lambda engine=engine, number=number: mapped(engine) <= node.metrics()[_regions(number)],  # type: ignore[misc]
                "the engine maps only the regions of its tenant",
            )
        largest = max(largest, arena_bytes(engines_of(node, engines)))
    return moved, memory + regions * HEADER_BYTES, largest


def restarts(rounds: int) -> tuple[int, int, int]:
    """End the daemon (SIGKILL and SIGTERM in turns) and start it again. One of two engines is stopped (SIGSTOP) while a
    daemon ends by SIGTERM. Returns (the setting `memory` and the headers of the regions, the largest size of all arenas
    while a daemon runs, the largest size that stays when it has ended), in bytes."""
    memory, largest, left = 16 * REGION_BYTES, 0, 0
    with daemons(1, str(memory), str(REGION_BYTES)) as cluster:
        node = cluster.nodes[0]
        with EngineProcess(node.socket) as one, EngineProcess(node.socket) as two:
            engines = [one, two]
            for number in range(rounds):
                for at, engine in enumerate(engines):
                    wait_until(lambda engine=engine: engine.ask("state")["connected"], "connected")  # type: ignore[misc]
                    for seed in range(10):
                        engine.ask("store", seed=100 * (2 * number + at) + seed, segments=16)
                        assert engine.ask("match", seed=100 * (2 * number + at) + seed, segments=16)["wrong"] == 0
                        engine.ask("release")
                largest = max(largest, arena_bytes(engines_of(node, engines)))
                if number % 2:
                    two.freeze()
                    assert node.stop() == 0
                else:
                    node.kill()
                with contextlib.suppress(AssertionError):
                    wait_until(lambda: arena_bytes(engines_of(node, engines)) == 0, "no memory is left", 10)
                left = max(left, arena_bytes(engines_of(node, engines)))
                two.thaw()
                node.start()
                cluster.wait_ready()
                largest = max(largest, arena_bytes(engines_of(node, engines)))
    return memory + 16 * HEADER_BYTES, largest, left


_TENANT = """
[[tenants]]
name = "tenant{number}"
secret = "{number:032x}"
tokens = ["tenant{number}-token-0123456789"]
"""


def _token(number: int) -> str:
    return f"tenant{number}-token-0123456789"


def _regions(number: int) -> str:
    return f'tokenlake_regions{{slot_bytes="16384",tenant="tenant{number}"}}'


def test_hand_overs_need_no_further_memory(tmp_path: Path) -> None:
    moved, memory, largest = hand_overs(3, tmp_path)
    assert moved == 10
    assert largest <= memory


def test_restarts_need_no_second_arena() -> None:
    memory, largest, left = restarts(2)
    assert left == 0
    assert largest <= memory


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
