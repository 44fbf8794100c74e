"""The scenes of the thirteen stories. The docstring of each is the introduction of its story."""

from __future__ import annotations

from typing import Any

from tests.core.scenes import copies
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tests.stories.render import Story
from tokenlake.core import events
from tokenlake.directory.ring import Ring

SHARES = dict.fromkeys(("dirty_share", "session_reserve_share", "session_lease_share"), 1.0)
RULES: dict[str, dict[str, Any]] = {
    "join": {"nodes": 3},
    "restart_with_disk": {"nodes": 3, "disk_places": 8, "regions": 60},
    "restart_with_memory": {"nodes": 3, "keep": True},
    "quota": {"quotas": {"red": 0.25}, **SHARES},
}
"""Where a scene differs from the others, which have four nodes."""


def read(story: Story) -> None:
    """Engine a at n1 reads the prompt s0 s1, which n0 owns; n2 is the directory node of both segments.
    Its second read finds the cached copies that the first one brought to n1."""
    keys, a = story.segments(2, 0, 2), story.join(1)
    story.own(0, keys)
    a.read(keys, Reading(hold_s=0.020))
    story.cluster.run_for(0.040)
    a.read(keys, Reading(fetch=False))


def write(story: Story) -> None:
    """Engine a at n0 computed the prompt s0 s1 and stores it; n1 is the directory node of s0, n2 of s1.
    The segments stay where they were computed: n0 owns them, and their directory nodes name n0."""
    keys, a = [*story.segments(1, 2), *story.segments(2, 1)], story.join(0)
    a.store(keys, 0, Storing())


def redundant_commit(story: Story) -> None:
    """Engines a at n0 and b at n1 compute s0 at the same time; n2 is its directory node.
    The first node that reports s0 owns it. The copy of the other one becomes a cached copy."""
    keys, a, b = story.segments(2, 3), story.join(0), story.join(1)
    a.store(keys, 0, Storing())
    b.store(keys, 0, Storing(fill_s=0.008))


def fetch_that_fails_over(story: Story) -> None:
    """Engine a at n3 fetches s0 from n0, which answers messages and sends no bytes. Within the same
    fetch n3 asks the candidates of s0: n2, its directory node, has no copy, and n1 has a cached one."""
    keys, a, b = story.segments(2, 1), story.join(3), story.join(1)
    story.own(0, keys)
    b.read(keys, Reading())
    story.begin()
    story.line("n0", "", "the bulk path of n0 is dead from here on")
    story.cluster.node(0).silent = True
    a.read(keys, Reading(hold_s=0.050))


def in_flight_wait(story: Story) -> None:
    """Engine a at n0 computes s0 when engine b at n1 asks for it, ready to wait; n2 is its directory
    node. The match is answered when a has committed: b does not compute s0 a second time."""
    keys, a, b = story.segments(2, 3), story.join(0), story.join(1)
    a.store(keys, 0, Storing(fill_s=0.015))
    story.cluster.run_for(0.005)
    b.read(keys, Reading(fetch=False, in_flight_wait_s=0.5))


def join(story: Story) -> None:
    """Node n3 joins and becomes the directory node of s0. The previous one, n1, becomes its stand-in and
    keeps its entry, so that engine a at n2 finds s0 at any time. No byte moves: n0 owns s0 as before."""
    a, before = story.join(2), story.cluster.record
    rings = [Ring(before), Ring(before.with_member("n3", before.members["n0"].weight))]
    pairs = {key: [ring.candidates(key)[0] for ring in rings] for key in prompt("joins", 100)}
    keys = story.name([key for key, pair in pairs.items() if pair == [("n1", "n2"), ("n3", "n1")]][:1])
    story.own(0, keys)
    story.cluster.add()
    for _ in range(2):
        story.cluster.run_for(0.020)
        a.read(keys, Reading(fetch=False))
        story.cluster.run_for(0.060)


def leave(story: Story) -> None:
    """n2, the owner of s0 and the directory node of s1, ends. n3, the owner of s1, tells the stand-in, n0.
    An operator takes n2 out of the ring record: n0 is the directory node of s1 now, and s0 is MISSING."""
    keys, a = [*story.segments(3, 0), *story.segments(2, 0)], story.join(1)
    story.own(2, keys[:1])
    story.own(3, keys[1:])
    story.line("n2", "", "ends")
    story.cluster.node(2).crash()
    story.cluster.run_for(0.050)
    story.cluster.leave("n2")
    story.cluster.run_for(0.050)
    for key in keys:
        a.read([key], Reading(fetch=False))
        story.cluster.run_for(0.020)


def kill_of_an_owner(story: Story) -> None:
    """n0, the owner of s0 and s1, is killed; n2 is the directory node of both. n1 has a cached copy of s0
    and becomes its owner. s1, which only n0 had, is lost: engine a at n3 computes it again."""
    keys, a, b = story.segments(2, 1, 2), story.join(3), story.join(1)
    story.own(0, keys)
    b.read(keys[:1], Reading())
    story.begin()
    story.line("n0", "", "killed")
    story.cluster.node(0).crash()
    story.cluster.run_for(1.0)
    a.read(keys, Reading(fetch=False))
    story.cluster.run_for(0.030)
    a.store(keys[1:], 1, Storing())


def restart_with_disk(story: Story) -> None:
    """The daemon of n0, the owner of s0, ends and starts again. Before, it writes s0 to its disk; after,
    it finds s0 there and tells n1, the directory node. For engine a at n2 it reads s0 from disk."""
    keys, a, node = story.segments(1, 2), story.join(2), story.cluster.node(0)
    story.own(0, keys)
    node.deliver(events.SaveRequested(1.0))
    story.cluster.run_for(0.020)
    story.line("n0", "", "ends, and starts again")
    node.crash()
    node.start()
    story.cluster.run_for(1.0)
    a.read(keys, Reading())


def restart_with_memory(story: Story) -> None:
    """The daemon of n0 ends in order while engine a reads s0, which n0 owns, and the next one finds s0 in
    the memory. a returns and names its lease, which goes on. Until then no slot gets another segment."""
    keys, a, node = story.segments(1, 2), story.join(0), story.cluster.node(0)
    story.own(0, keys)
    a.read(keys, Reading(hold_s=0.300))
    story.cluster.run_for(0.010)
    for engine in story.cluster.engines:
        engine.processes[0].returns_after_s = 0.030
    node.end()
    story.cluster.run_for(0.010)
    story.line("n0", "", "ends, and starts again")
    node.start()
    story.cluster.run_for(0.500)


def drain(story: Story) -> None:
    """n0 drains: it offers its primary copies s0 and s1 to n1, which fetches them although no engine
    waits and tells n2, the directory node of both. Then n0 leaves the ring record."""
    story.own(0, story.segments(2, 1, 2))
    story.cluster.drain("n0")
    story.cluster.run_for(1.5)


def quota(story: Story) -> None:
    """The tenant of engine a has a quota of three slots at n0, which the prompt s0 s1 s2 fills. For s3 the
    segment of least retention value is evicted. While a reads all that are left, s4 is refused."""
    keys, a = story.segments(1, 2, 5), story.join(0)
    story.own(0, keys[:3])
    a.store(keys[3:4], 0, Storing())
    story.cluster.run_for(0.050)
    for kept in (keys[:2], keys[3:4]):
        a.read(kept, Reading(fetch=False, hold_s=0.050))
    story.cluster.run_for(0.010)
    a.store(keys[4:], 0, Storing())


def corrupt_copy(story: Story) -> None:
    """A bit flips in the copy of s0 at its owner, n0; n2 is the directory node. Engine a at n1 fetches s0,
    n1 finds and reports the wrong checksum, n0 checks its copy and drops it. a computes s0 again."""
    keys, a = story.segments(2, 0), story.join(1)
    story.own(0, keys)
    story.line("n0", "", "a bit flips in the slot of s0")
    story.cluster.node(0).arena.flip(copies(story.cluster, keys[0])[0].place, 0)
    a.read(keys, Reading(hold_s=0.015))
    story.cluster.run_for(0.030)
    a.store(keys, 0, Storing())
