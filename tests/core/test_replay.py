"""A recorded list of events through a fresh core gives the same instructions, in this process and in another."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.sim.arena import SHARDS, SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import PROMPTS
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.core.instructions import Instruction
from tokenlake.hints import Hints
from tokenlake.memory import State
from tokenlake.wire.engine import Explain
from tokenlake.wire.slots import join_keys


class Recording(msgspec.Struct):
    """One life of a node."""

    config: CoreConfig
    started: float
    log: list[tuple[float, events.Event]]


def replay(recording: Recording) -> list[list[Instruction]]:
    """Instructions per event."""
    core = NodeCore(recording.config)
    core.start(recording.started)
    return [core.handle(event, now) for now, event in recording.log]


def digest(emitted: list[list[Instruction]]) -> str:
    """A digest over every field of every instruction."""
    return hashlib.blake2b(msgspec.msgpack.encode(emitted)).hexdigest()


@pytest.fixture(scope="module")
def busy() -> Cluster:
    """Every kind of event: engines of two tenants, faults of nodes, disks and network, daemons that restart with their
    memory, a node that joins and drains, then a quiet end."""
    cluster = Cluster(3, seed=25, recording=True, disk_places=10, keep=True)
    random = cluster.clock.random
    for turn in range(300):
        if len(cluster.alive()) < 5:
            cluster.join(random.randrange(3), random.choice(("red", "red", "blue")), random.randrange(1, 3))
            continue
        engine = random.choice(cluster.alive())
        prompt = random.choice(PROMPTS)
        engine.read(prompt, Reading(attach=random.random() < 0.3, hold_s=random.choice((0.01, 0.2)), verify=True))
        ending = random.choice(("commit", "commit", "singly", "abort", "die"))
        # An engine that writes a segment does not fetch it.
        if random.random() < 0.5:
            engine.store(prompt, 0, Storing(ending, shared=random.random() < 0.3))
        if turn % 20 == 15:
            name = next(iter(cluster.core(0)._explain._trails), ("red", "nobody"))[1]
            engine.processes[0].request(partial(Explain, request=name), engine.answers.append)
        if turn % 20 == 7:
            packed = join_keys(prompt[:2])
            for event in (
                events.LocateRequested(turn, "red", packed),
                events.HintGiven("red", packed, Hints(priority=1)),
                events.EvictRequested(turn, "red", packed),
                events.PrefetchRequested(turn, "red", join_keys(prompt), SLOT_BYTES, SHARDS, pin_s=1.0),
                events.UnpinRequested(turn, "red", packed),
            ):
                cluster.node(0).deliver(event)
        if turn % 10 == 5:
            ready = [s for s in engine.node.core.store.segments() if s.state is State.READY] if engine.node.core else []
            for segment in ready:
                engine.node.arena.flip(segment.place, 0)
        if turn % 30 == 10:
            random.choice(cluster.links()).cut(0.1)
        if turn in (150, 152, 154):
            cluster.node((turn - 150) // 2).deliver(events.DiskGone(0, "input/output error"))
        if turn in (151, 153, 155):
            cluster.node((turn - 151) // 2).find_disk()
        if turn == 290:
            cluster.node(1).deliver(events.EvictRequested(1000, "red", b""))
        if turn == 295:
            cluster.node(1).deliver(events.SaveRequested(1.0))
        if turn in (16, 18):
            # One daemon ends in order, one is killed. One of the processes that survive dies before it returns.
            node = cluster.node(turn // 2 % 2)
            assert node.kept is not None
            survivor = next(iter(node.kept.survivors.values()))
            survivor.returns_after_s = 5.0
            node.end()
            cluster.run_for(0.02)
            if node.core is not None:
                node.crash()
            node.start()
            cluster.run_for(0.02)
            survivor.die()
        if turn == 297:
            cluster.node(1).deliver(events.SealRequested())
        if turn % 50 == 20:
            node = cluster.node(1 + turn // 50 % 2)
            node.freeze()
            cluster.clock.after(0.4, node.thaw)
        if turn >= 60 and len(cluster.nodes) == 3:
            cluster.add(0.1, missed=("n1",))
        if turn >= 200 and cluster.record.epoch == 1:
            cluster.drain("n3", 0.1, missed=("n2",))
        cluster.run_for(random.choice((0.0, 0.005, 0.02)))
        cluster.check()
    cluster.settle()
    cluster.check_settled()
    return cluster


def test_a_replay_gives_the_same_instructions(busy: Cluster) -> None:
    for node in busy.nodes.values():
        assert len(node.log) > (100 if node.retired else 300)
        assert replay(Recording(node.config, node.started, node.log)) == node.emitted


def test_every_kind_of_event_is_in_the_recording(busy: Cluster) -> None:
    seen = {type(event) for node in busy.nodes.values() for _, event in node.log}
    assert set(events.Event.__args__) - seen <= {events.RegionReady}


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_hashing_of_strings_plays_no_part(busy: Cluster, seed: str, tmp_path: Path) -> None:
    node = busy.node(0)
    path = tmp_path / "recording"
    path.write_bytes(msgspec.msgpack.encode(Recording(node.config, node.started, node.log)))
    root = Path(__file__).parents[2]
    path_of_modules = os.pathsep.join((str(root), str(root / "bench")))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path_of_modules}
    command = [sys.executable, "-m", "tests.core.test_replay", str(path)]
    found = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True).stdout
    assert found.strip() == digest(node.emitted)


if __name__ == "__main__":
    recorded = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Recording)
    print(digest(replay(recorded)))
