"""A process that is killed while it stores segments: all that it had synced come back, with the right bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.disk.device_scene import served
from tests.server.disk.killed_device import KEYS, found
from tokenlake.core import events
from tokenlake.wire import Code
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_testing.children import start_child

pytestmark = [pytest.mark.live, pytest.mark.rest]

KILLS = 20
Slot = tuple[str, int, int]


def test_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    synced: dict[Slot, tuple[int, int]] = {}
    back = 0
    process = start_child(
        [sys.executable, "-m", "tests.server.disk.killed_device", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for kill in range(KILLS):
            process.stdin.write(f"{kill + 1}\n")
            process.stdin.flush()
            left, pid = chance.randint(1, 400), 0
            while (line := process.stdout.readline()) != "ended\n":
                assert line, "the process ended"
                word, *fields = line.split()
                if word == "pid":
                    pid = int(fields[0])
                    continue
                slot = fields[0], int(fields[1]), int(fields[2])
                synced.pop(slot, None)
                if word == "synced":
                    synced[slot] = int(fields[3]), int(fields[4])
                left -= 1
                if left == 0:
                    os.kill(pid, signal.SIGKILL)
            back += check(tmp_path, synced)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert back > KILLS


def check(path: Path, synced: dict[Slot, tuple[int, int]]) -> int:
    """Read all that comes back; `synced` must be among it. Returns how many these are."""
    with served(lambda: DirectoryFiles(path), KEYS) as scene:
        scene.wait(events.DiskRecovered)
        right = {}
        for each in found(scene):
            # Compares the bytes.
            if scene.read([each]) == bytes([Code.LOCAL]):
                number = int.from_bytes(each.key, "big")
                right[each.tenant, each.slot_bytes, each.slot] = each.generation, number
    assert synced.items() <= right.items()
    return len(synced)
