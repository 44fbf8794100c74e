"""Short scenes for directed tests of NodeCore: a calm cluster, and one request at a time."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

from tests.sim.cluster import Cluster
from tests.sim.engine import Engine, SimProcess, Storing
from tests.sim.prompts import prompt
from tokenlake.core import events, instructions
from tokenlake.core.report.account import SUPPLIED, Source
from tokenlake.core.report.misses import MISSED
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.memory import Kind, Segment
from tokenlake.metrics import Counters
from tokenlake.wire import Code, engine
from tokenlake.wire.funnel import Funnel
from tokenlake.wire.slots import join_keys

T = TypeVar("T")
ROOMY: dict[str, Any] = {"dirty_share": 1.0, "session_reserve_share": 1.0, "session_lease_share": 1.0}
"""Rules under which one session may use all memory of a node."""


def calm(nodes: int = 3, **rules: Any) -> Cluster:
    """A cluster whose nodes are connected and whose directories are complete; its clock makes nothing slow."""
    cluster = Cluster(nodes, recording=True, **{"regions": 4, **rules})
    cluster.calm()
    cluster.run_for(0.3)
    return cluster


def placed(cluster: Cluster, directory_node: int, other: int, count: int = 1, name: str = "p") -> list[SegmentKey]:
    """Keys with this directory node and this other candidate."""
    wanted = (f"n{directory_node}", f"n{other}")
    ring = cluster.core(directory_node).ring
    keys = prompt(name, 200 * len(cluster.nodes))
    return [key for key, pair in zip(keys, ring.candidates(join_keys(keys)), strict=True) if pair == wanted][:count]


@contextlib.contextmanager
def within(cluster: Cluster, seconds: float) -> Iterator[None]:
    """What is done meanwhile takes less time than this."""
    began = cluster.clock.now
    yield
    assert cluster.clock.now - began < seconds


def ask(process: SimProcess, kind: type[Any], *fields: Any) -> list[Any]:
    """Send a request with these fields after its id. Returns the list that its reply will be in."""
    replies: list[Any] = []
    process.request(lambda number: kind(number, *fields), replies.append)
    return replies


def answer(cluster: Cluster, process: SimProcess, kind: type[Any], *fields: Any) -> Any:
    """Send a request and let time pass until its reply is there."""
    replies = ask(process, kind, *fields)
    until = cluster.clock.now + 5.0
    while not replies and cluster.clock.now < until:
        cluster.run_for(0.0005)
    assert replies, "no answer"
    return replies[0]


def tell(cluster: Cluster, process: SimProcess, message: Any) -> None:
    """Send a message without a reply and let it arrive."""
    process.tell(message)
    cluster.run_for(0.005)


def match(
    cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey], name: str = "", tokens: int = 0
) -> engine.Matched:
    """The reply to a match. The lease stays. `name`: of the request; `tokens`: of the prompt."""
    fields = (join_keys(keys), 0.0, True, name, None, tokens)
    reply: engine.Matched = answer(cluster, reader.processes[0], engine.Match, *fields)
    return reply


def match_independent(
    cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey], name: str = "", wait_s: float = 0.0, tokens: int = 0
) -> engine.Matched:
    """The reply to a match of independent keys. The lease stays."""
    fields = (join_keys(keys), 0.0, True, name, None, tokens, wait_s, 0.0, True)
    reply: engine.Matched = answer(cluster, reader.processes[0], engine.Match, *fields)
    return reply


def fetch(cluster: Cluster, reader: Engine, lease: int, count: int) -> engine.Fetched:
    """The reply to a fetch of the first `count` items."""
    reply: engine.Fetched = answer(cluster, reader.processes[0], engine.Fetch, lease, 0, count, 0.0)
    return reply


def prepare(cluster: Cluster, writer: Engine, keys: Sequence[SegmentKey], first: int = 0) -> engine.Prepared:
    """The reply to a prepare."""
    reply: engine.Prepared = answer(cluster, writer.processes[0], engine.Prepare, join_keys(keys), first)
    return reply


def store(cluster: Cluster, writer: Engine, keys: Sequence[SegmentKey], first: int = 0) -> None:
    """Store one segment sequence, and let its messages arrive."""
    writer.store(keys, first, Storing())
    cluster.run_for(0.5)
    cluster.check()


def release(cluster: Cluster, reader: Engine, lease: int, stop: int, start: int = 0, *, read: bool = False) -> None:
    """Give items of a lease back, and let the message arrive. `read`: they were read."""
    tell(cluster, reader.processes[0], engine.Release(((lease, start, stop),), read))


def read(cluster: Cluster, reader: Engine, keys: Sequence[SegmentKey], name: str = "", tokens: int = 0) -> list[Code]:
    """Match, fetch what was found, and give it back as read. The codes of the fetch, or those of a match without
    hits."""
    found = match(cluster, reader, keys, name, tokens)
    codes = fetch(cluster, reader, found.lease, found.hits).codes if found.hits else found.codes
    release(cluster, reader, found.lease, found.hits, read=True)
    return [Code(code) for code in codes]


def stored(
    count: int = 1, *, pair: tuple[int, int] = (0, 1), nodes: int = 3, at: int = 0, reader: int = 2, **rules: Any
) -> tuple[Cluster, Engine, list[SegmentKey]]:
    """A cluster whose first engine, at node `at`, stored `count` segments with these candidates; an engine at node
    `reader`; and the keys."""
    cluster = calm(nodes, **rules)
    writer, other = cluster.join(at), cluster.join(reader)
    keys = placed(cluster, *pair, count)
    store(cluster, writer, keys)
    return cluster, other, keys


def offer(cluster: Cluster, giver: int, receiver: int, keys: Sequence[SegmentKey], tenant: str = "red") -> None:
    """Make node `giver` offer its copies of these segments to node `receiver`, as if the memory of `receiver` had been
    emptier for long and the segments had just been committed."""
    node, handover = cluster.node(giver), cluster.core(giver)._handover
    # Moves the time of the rules to the present.
    node.deliver(events.Tick())
    segments = [copies(cluster, key, tenant)[giver] for key in keys]
    leads = {NodeId(f"n{receiver}"): math.inf}
    with patch.object(handover, "_leads", leads), patch.object(handover, "_emptiest", lambda: next(iter(leads))):
        handover.committed(segments)
    # Carries out the instructions of the offer.
    node.deliver(events.Tick())


def copies(cluster: Cluster, key: SegmentKey, tenant: str = "red") -> dict[int, Segment]:
    """The copies of a segment, by node."""
    found: dict[int, Segment] = {}
    for index, node in enumerate(cluster.nodes.values()):
        for segment in node.core.store.segments() if node.core is not None else ():
            if segment.key == key and segment.tenant == tenant:
                found[index] = segment
    return found


def kinds(cluster: Cluster, key: SegmentKey, tenant: str = "red") -> dict[int, Kind]:
    """The kinds of the copies of a segment, by node."""
    return {index: segment.kind for index, segment in copies(cluster, key, tenant).items()}


def supplied(counters: Counters, *sources: Source) -> int:
    """The tokens that engines read from these sources; without `sources` from all."""
    return sum(
        tokens for (_, source), tokens in counters.by_labels(SUPPLIED).items() if source in (sources or [*Source])
    )


def missed(counters: Counters, tenant: str = "red") -> dict[str, int]:
    """The tokens that a tenant missed, by reason, without the zeros."""
    sums: Counter[str] = Counter()
    for (owner, reason, _), tokens in counters.by_labels(MISSED).items():
        if owner == tenant and tokens:
            sums[reason] += tokens
    return dict(sums)


def explained(cluster: Cluster, asker: Engine, name: str) -> Funnel:
    """The funnel of a known request, whose tokens add up."""
    funnel = answer(cluster, asker.processes[0], engine.Explain, name).funnel
    assert isinstance(funnel, Funnel)
    spent = funnel.engine_had + funnel.supplied + funnel.held + sum(missed.tokens for missed in funnel.missed)
    assert funnel.ideal == spent
    cluster.check()
    return funnel


def most_at_once(cluster: Cluster, node: int, kind: type[Any]) -> int:
    """The most messages of one type, to engines and peers, that a node's rules returned for one event."""
    outs = cluster.node(node).emitted
    return max(sum(isinstance(getattr(each, "message", None), kind) for each in out) for out in outs)


def said(cluster: Cluster, node: int, kind: type[T]) -> list[T]:
    """The instructions of one type that a node's rules returned since its start, or the messages to peers in them."""
    emitted = [instruction for out in cluster.node(node).emitted for instruction in out]
    frames = [i.message for i in emitted if isinstance(i, instructions.SendToPeer)]
    return [found for found in [*emitted, *frames] if isinstance(found, kind)]
