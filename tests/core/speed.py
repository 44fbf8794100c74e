"""How fast a core is: `python -m tests.core.speed [--profile]`. Prints; asserts nothing."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.core.test_replay import Recording, replay
from tests.rules.eviction_scene import Memory
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import PROMPTS, prompt
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.core.instructions import Answer, SendToPeer
from tokenlake.directory.ring_record import RingRecord
from tokenlake.memory import Segment
from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.slots import join_keys

SLOT_BYTES = 1 << 20
KEYS = 128
TURNS = 500
LATER = 10.0
"""Directories count as complete."""
NODES = RingRecord.of({"a": 1, "b": 1})
HELD = join_keys(prompt("turn 7", KEYS))
"""Keys of a prompt that the local core holds."""


def replies(core: NodeCore, message: Any, now: float) -> Any:
    """The answer to one request."""
    out = core.handle(events.Requested(1, message), now)
    return next(i.message for i in out if isinstance(i, Answer))


def local_core(name: str = "a") -> tuple[NodeCore, bytes]:
    """One node that holds 4,096 segments. Returns it, and the keys of a prompt of 128 of them."""
    config = CoreConfig(name, 1, NODES, 1, 4200 * (SLOT_BYTES + 64), dirty_share=1.0)
    core = NodeCore(config)
    core.start(0.0)
    core.handle(events.Joined(1, 1, "red", SLOT_BYTES, 8, 256, 0, 0), 0.0)
    for turn in range(32):
        keys = join_keys(prompt(f"turn {turn}", KEYS))
        prepared = replies(core, engine.Prepare(1, keys, 0), 0.0)
        assert set(prepared.codes) == {Code.RESERVED}
        done = engine.Commit(2, prepared.write, tuple(range(KEYS)), 255, bytes(64 * KEYS))
        assert set(replies(core, done, 0.0).codes) == {Code.COMMITTED}
    return core, HELD


def match_and_release() -> None:
    """Match and lease 128 keys that are here, then give them back."""
    core, keys = local_core()
    took: dict[str, list[float]] = {}
    for turn in range(TURNS):
        began = time.perf_counter()
        matched = replies(core, engine.Match(turn, keys, 0.0, False), 1.0)
        given = time.perf_counter()
        assert matched.hits == KEYS
        core.handle(events.Requested(1, engine.Release(((matched.lease, 0, KEYS),))), 1.0)
        took.setdefault("local match", []).append(given - began)
        took.setdefault("its release", []).append(time.perf_counter() - given)
    _print(took)


def remote_match() -> None:
    """Match 128 keys that another node has, and 512 that no node has; each step of both nodes is timed on its own."""
    cores = {"a": NodeCore(CoreConfig("a", 1, NODES, 1, 300 * (SLOT_BYTES + 64))), "b": local_core("b")[0]}
    cores["a"].start(0.0)
    cores["a"].handle(events.Joined(1, 1, "red", SLOT_BYTES, 8, 256, 0, 0), 0.0)
    took: dict[str, list[float]] = {}
    for name, other in (("a", "b"), ("b", "a")):
        _pump(cores, name, events.PeerUp(other, 1), took)
    # Tell "a" which segments "b" owns.
    for turn in range(32):
        _pump(cores, "a", events.PeerSent("b", peer.Owned("red", join_keys(prompt(f"turn {turn}", KEYS)))), took)
    took.clear()
    for turn in range(TURNS):
        [matched] = _pump(cores, "a", events.Requested(1, engine.Match(turn, HELD, 0.0, False)), took)
        assert matched.codes.count(Code.REMOTE) == KEYS
        _pump(cores, "a", events.Requested(1, engine.Release(((matched.lease, 0, KEYS),))), took)
    _print(took)
    took.clear()
    nowhere = join_keys(prompt("nowhere", 512))
    for turn in range(TURNS // 5):
        [matched] = _pump(cores, "a", events.Requested(1, engine.Match(turn, nowhere, 0.0, False)), took)
        assert matched.codes.count(Code.MISSING) == 512
    _print({f"{step}, 512 missing": times for step, times in took.items()})


def _pump(cores: dict[str, NodeCore], name: str, event: events.Event, took: dict[str, list[float]]) -> list[Any]:
    """Deliver an event to a core, and the messages that follow from it to the other cores. Returns the replies to
    engines."""
    answers: list[Any] = []
    waiting = [(name, event)]
    while waiting:
        name, event = waiting.pop(0)
        began = time.perf_counter()
        out = cores[name].handle(event, LATER)
        what = type(getattr(event, "message", event)).__name__
        took.setdefault(f"{what} at {name}", []).append(time.perf_counter() - began)
        waiting += ((i.node, events.PeerSent(name, i.message)) for i in out if isinstance(i, SendToPeer))
        answers += (i.message for i in out if isinstance(i, Answer))
    return answers


def _print(took: dict[str, list[float]]) -> None:
    for what, times in took.items():
        times.sort()
        print(f"{what}: least {times[0] * 1e6:.0f} us, p50 {times[len(times) // 2] * 1e6:.0f} us")


def store() -> None:
    """Prepare and commit 128 keys."""
    core, _ = local_core()
    began = time.perf_counter()
    for turn in range(20):
        prepared = replies(core, engine.Prepare(1, join_keys(prompt(f"new {turn}", KEYS)), 0), 1.0)
        replies(core, engine.Abort(prepared.write) if not prepared.write else _whole(prepared), 1.0)
    print(f"prepare and commit of {KEYS} keys: {(time.perf_counter() - began) / 20 * 1e6:.0f} us")


def _whole(prepared: engine.Prepared) -> engine.Commit:
    indices = tuple(index for index, code in enumerate(prepared.codes) if code == Code.RESERVED)
    return engine.Commit(2, prepared.write, indices, 255, bytes(64 * len(indices)))


def eviction() -> None:
    """By policy, per segment: touches of stored segments, and stores into a full memory, which evict."""
    for name, make in (("forecast", Forecast), ("lru", LeastRecentlyUsed)):
        memory = Memory(make(), 4096)
        for turn in range(64):
            memory.request([f"{name} {turn} {depth}" for depth in range(64)], float(turn))
        prompts = [list(memory.here.values())[at : at + KEYS] for at in range(0, 4096, KEYS)]
        touched = _least(partial(_touch, memory.policy, prompts))
        stored = _least(lambda turn: memory.request([(turn, depth) for depth in range(KEYS)], 1000.0 + turn))  # noqa: B023
        print(f"{name}: {touched / KEYS * 1e6:.2f} us to touch, {stored / KEYS * 1e6:.2f} us to store and evict")


def _touch(policy: EvictionPolicy, prompts: list[list[Segment]], turn: int) -> None:
    for segment in prompts[turn % len(prompts)]:
        policy.touch(segment, 100.0 + turn)


def _least(work: Callable[[int], object]) -> float:
    """Seconds of the fastest hundredth of some runs, which other work of the machine disturbed least."""
    took = []
    for turn in range(TURNS):
        began = time.perf_counter()
        work(turn)
        took.append(time.perf_counter() - began)
    return sorted(took)[TURNS // 100]


def busy_log() -> None:
    """Events of a busy cluster through a fresh core."""
    cluster = Cluster(3, seed=1, recording=True)
    random = cluster.clock.random
    for _ in range(2000):
        if len(cluster.alive()) < 5:
            cluster.join(random.randrange(3))
        else:
            actor = random.choice(cluster.alive())
            actor.read(random.choice(PROMPTS), Reading(hold_s=0.02))
            actor.store(random.choice(PROMPTS), 0, Storing())
        cluster.run_for(0.01)
    node = cluster.node(0)
    began = time.perf_counter()
    replay(Recording(node.config, 0.0, node.log))
    took = time.perf_counter() - began
    print(f"{len(node.log)} events: {len(node.log) / took:.0f} a second, {took / len(node.log) * 1e6:.0f} us each")


if __name__ == "__main__":
    profile = cProfile.Profile()
    if "--profile" in sys.argv:
        profile.enable()
    for part in (match_and_release, remote_match, store, eviction, busy_log):
        part()
    if "--profile" in sys.argv:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
