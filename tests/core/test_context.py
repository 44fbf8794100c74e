"""Bytes read and written per tenant, as the engines of the scene count them, and the bounds of what a node states."""

from __future__ import annotations

import collections
import random

from tests.core.scenes import calm, copies, store
from tests.sim.arena import SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tokenlake.core import events, instructions
from tokenlake.core.context import Context
from tokenlake.core.engines.write import WRITTEN_BYTES
from tokenlake.core.report.account import READ_BYTES
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.fields import MAX_AMOUNT
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys


def counted(cluster: Cluster, metric: Metric) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for node in range(len(cluster.nodes)):
        for (first, *_), count in cluster.core(node).counters.by_labels(metric).items():
            sums[first] += count
    return dict(sums)


def test_each_byte_is_counted_once() -> None:
    cluster = calm(3, regions=6, dirty_share=1.0)
    draw = random.Random(7)
    engines = [cluster.join(node, tenant) for node in range(3) for tenant in ("red", "blue")]
    cluster.run_for(0.05)
    for _ in range(150):
        chosen = draw.choice(engines)
        keys = prompt(draw.choice("abcde"), draw.randrange(1, 4))
        if draw.random() < 0.5:
            chosen.store(keys, 0, Storing())
        else:
            chosen.read(keys, Reading(hold_s=0.05))
        cluster.run_for(0.1)
    read: collections.Counter[str] = collections.Counter()
    written: collections.Counter[str] = collections.Counter()
    for each in engines:
        for answer in each.answers:
            if isinstance(answer, engine.Matched):
                read[each.tenant] += answer.codes[: answer.hits].count(Code.LOCAL) * SLOT_BYTES
            elif isinstance(answer, engine.Committed):
                written[each.tenant] += answer.codes.count(Code.COMMITTED) * SLOT_BYTES
    assert counted(cluster, WRITTEN_BYTES) == dict(written)
    assert counted(cluster, READ_BYTES) == dict(read)
    assert set(read) == set(written) == {"red", "blue"}


def test_a_node_states_its_load_and_ages_within_bounds() -> None:
    """Other nodes would refuse frames with values beyond the bounds."""
    cluster = calm(3)
    (key,) = prompt("old", 1)
    store(cluster, cluster.join(0), [key])
    owner = next(iter(copies(cluster, key)))
    core, asking, later = cluster.core(owner), f"n{(owner + 1) % 3}", cluster.clock.now + 2e9
    looked_up = core.handle(events.PeerSent(asking, peer.Lookup(1, "red", join_keys([key]))), later)
    pinged = core.handle(events.PeerSent(asking, peer.Ping(2, (0.0, 0.0, 0.0), 0.0)), later)
    messages = [each.message for each in (*looked_up, *pinged) if isinstance(each, instructions.SendToPeer)]
    assert {type(message) for message in messages} >= {peer.LookupReply, peer.Pong}
    for message in messages:
        assert decode(peer.peer_decoder, encode(message)) == message


def test_the_load_is_bounded() -> None:
    context = Context(calm(3).core(0).config)
    context.sends(1 << 120)
    assert context.load() == MAX_AMOUNT
