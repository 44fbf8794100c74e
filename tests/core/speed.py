"""How fast a core is: `python -m tests.core.speed [--profile]`. Prints; asserts nothing."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from typing import Any

from tests.core.test_replay import Recording, replay
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import PROMPTS, prompt
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.core.instructions import Answer
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import join_keys

SLOT_BYTES = 1 << 20
KEYS = 128
TURNS = 500


def replies(core: NodeCore, message: Any, now: float) -> Any:
    """The answer to one request."""
    out = core.handle(events.Requested(1, message), now)
    return next(i.message for i in out if isinstance(i, Answer))


def local_core() -> tuple[NodeCore, bytes]:
    """One node that holds 4,096 segments, 128 of them the prompt."""
    config = CoreConfig("a", 1, {"a": 1, "b": 1, "c": 1}, 1, 4200 * (SLOT_BYTES + 64), dirty_share=1.0)
    core = NodeCore(config)
    core.start(0.0)
    core.handle(events.Joined(1, 1, "red", SLOT_BYTES, 8, 256, 0, 0), 0.0)
    for turn in range(32):
        keys = join_keys(prompt(f"turn {turn}", KEYS))
        prepared = replies(core, engine.Prepare(1, keys, 0), 0.0)
        assert set(prepared.codes) == {Code.RESERVED}
        done = engine.Commit(2, prepared.write, tuple(range(KEYS)), 255, bytes(64 * KEYS))
        assert set(replies(core, done, 0.0).codes) == {Code.COMMITTED}
    return core, join_keys(prompt("turn 7", KEYS))


def match_and_release() -> None:
    """Match and lease 128 keys that are here, then give them back."""
    core, keys = local_core()
    took = []
    for turn in range(TURNS):
        began = time.perf_counter()
        matched = replies(core, engine.Match(turn, keys, 0.0), 1.0)
        took.append(time.perf_counter() - began)
        assert matched.hits == KEYS
        core.handle(events.Requested(1, engine.Release(((matched.lease, 0, KEYS),))), 1.0)
    took.sort()
    print(f"local match of {KEYS} keys: p50 {took[TURNS // 2] * 1e6:.0f} us, p99 {took[-TURNS // 100] * 1e6:.0f} us")


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
    for part in (match_and_release, store, busy_log):
        part()
    if "--profile" in sys.argv:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
