"""Runs a device in a process that a test kills: `python -m tests.server.disk.killed_device DIRECTORY`.

For each line of its input, a seed, it starts a process, which stores segments until it is killed, and prints::

    pid N
    forget TENANT SLOT_BYTES SLOT                      before the place is given up
    synced TENANT SLOT_BYTES SLOT GENERATION NUMBER    after the device has answered that the segment is stored
    ended
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from tests.server.disk.device_scene import Scene, served
from tests.server.disk.scene import Entry, entries, entry
from tokenlake.core import events
from tokenlake.wire import Code
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_server.disk.store import Found
from tokenlake_server.disk.table import Slab

SLABS = [("a", 4096), ("b", 5000), ("b", 65536)]
PLACES = 24
KEYS = DiskKeys([b"k" * 32])


def say(text: str) -> None:
    """Print a line with one system call, so that a kill leaves whole lines."""
    os.write(1, f"{text}\n".encode())


def run(directory: Path, seed: int) -> None:
    """Store and forget segments for ever."""
    chance = random.Random(seed)
    with served(lambda: DirectoryFiles(directory), KEYS) as scene:
        scene.wait(events.DiskRecovered)
        there = {(each.tenant, each.slot_bytes, each.slot): each for each in found(scene)}
        generation = max((each.generation for each in there.values()), default=0)
        number = seed << 32
        while True:
            tenant, slot_bytes = chance.choice(SLABS)
            slots = chance.sample(range(PLACES), chance.randint(1, 12))
            for slot in slots:
                if old := there.pop((tenant, slot_bytes, slot), None):
                    say(f"forget {tenant} {slot_bytes} {slot}")
                    scene.forget([old])
            generation += 1
            batch = []
            for slot in slots:
                number += 1
                batch.append(entry(number, slot, generation, slot_bytes, tenant))
            assert scene.written(batch) == bytes([Code.COMMITTED]) * len(batch)
            for each in batch:
                there[tenant, slot_bytes, each.slot] = each
            lines = [
                f"synced {tenant} {slot_bytes} {e.slot} {generation} {int.from_bytes(e.key, 'big')}" for e in batch
            ]
            say("\n".join(lines))
            with scene.changed:
                scene.seen.clear()


def found(scene: Scene) -> list[Entry]:
    """The segments that a device has reported."""
    parts = [
        Found(Slab(0, each.tenant, each.slot_bytes), each.shards, each.keys, each.places, each.notes)
        for each in scene.of(events.DiskFound)
    ]
    return [each for part in parts for each in entries(part)]


def main() -> None:
    directory = Path(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(directory, int(line))
        say(f"pid {child}")
        os.waitpid(child, 0)
        say("ended")


if __name__ == "__main__":
    main()
