"""Bytes read and written per tenant, against what the engines of the scene did."""

from __future__ import annotations

import collections
import random

from tests.core.scenes import calm, copies, store
from tests.sim.arena import SLOT_BYTES
from tests.sim.cluster import Cluster
from tests.sim.engine import Reading, Storing
from tests.sim.prompts import prompt
from tokenlake.core import events, instructions
from tokenlake.core.context import READ_BYTES
from tokenlake.core.write import WRITTEN_BYTES
from tokenlake.metrics import Metric
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys


def counted(cluster: Cluster, metric: Metric) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for node in range(len(cluster.nodes)):
        sums.update(cluster.core(node).counters.by_label(metric))
    return dict(sums)


def test_each_byte_is_counted_once_where_it_lay() -> None:
    cluster = calm(3, regions=6, hot="off", dirty_share=1.0)
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
            if isinstance(answer, engine.Fetched):
                read[each.tenant] += answer.codes.count(Code.LOCAL) * SLOT_BYTES
            elif isinstance(answer, engine.Committed):
                written[each.tenant] += answer.codes.count(Code.COMMITTED) * SLOT_BYTES
    assert counted(cluster, WRITTEN_BYTES) == dict(written)
    assert counted(cluster, READ_BYTES) == dict(read)
    assert set(read) == set(written) == {"red", "blue"}


def test_what_a_node_says_can_be_heard_however_much_is_read_and_however_long_ago() -> None:
    """Else its peers would take it for one that breaks the protocol."""
    cluster = calm(3)
    (key,) = prompt("old", 1)
    store(cluster, cluster.join(0), [key])
    keeper = next(iter(copies(cluster, key)))
    core = cluster.core(keeper)
    later = cluster.clock.now + 2e9
    asker = f"n{(keeper + 1) % 3}"
    asked = core.handle(events.PeerSent(asker, peer.Lookup(1, "red", join_keys([key]))), later)
    core._context.served(copies(cluster, key)[keeper].tenant, 1 << 120)
    pinged = core.handle(events.PeerSent(asker, peer.Ping(2, (0.0, 0.0, 0.0), 0.0, 0)), later)
    said = [each.message for each in (*asked, *pinged) if isinstance(each, instructions.SendToPeer)]
    assert {type(message) for message in said} >= {peer.LookupReply, peer.Pong}
    for message in said:
        assert decode(peer.peer_decoder, encode(message)) == message
