"""Hints reaches whoever keeps the segments, with the request or after it, and is no use of them."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.scenes import answer, calm, copies, fetch, kinds, match, placed, said, tell
from tests.sim.arena import SHARDS, content
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.hints import NO_ACCESS, NO_HINTS, Hints, Outlook
from tokenlake.identity import SegmentKey
from tokenlake.store import Kind
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import join_keys

CHAT = Hints(Outlook.GOES_ON, "chat")
OVER = Hints(Outlook.OVER, stop_reason="stop")
CHAT_OVER = Hints(Outlook.OVER, "chat", "stop")


def stored(cluster: Cluster, writer: Engine, keys: list[SegmentKey], hints: Hints | None) -> None:
    """Stored with hints, and pushed wherever it goes."""
    process = writer.processes[0]
    reply = answer(cluster, process, engine.Prepare, join_keys(keys), 0, "r", hints)
    checksums = b"".join(part for key in keys for part in content("red", key))
    for index, packed in enumerate(reply.slots[at : at + 16] for at in range(0, len(reply.slots), 16)):
        for shard in range(SHARDS):
            process.view(packed, keys[index]).write(shard, content("red", keys[index])[shard])
    fields = reply.write, tuple(range(len(keys))), (1 << SHARDS) - 1, checksums
    answer(cluster, process, engine.Commit, *fields)
    cluster.run_for(0.5)
    cluster.check()


def hints_of(cluster: Cluster, key: SegmentKey) -> dict[int, Hints]:
    """What engines said of each copy, by node."""
    return {node: replace(segment.hints, access=NO_ACCESS) for node, segment in copies(cluster, key).items()}


def test_the_writers_word_goes_with_the_push() -> None:
    cluster = calm()
    writer = cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    stored(cluster, writer, keys, CHAT)
    assert kinds(cluster, keys[0]) == {0: Kind.PRIMARY, 2: Kind.CACHED}
    assert [hints_of(cluster, key) for key in keys] == [{0: CHAT, 2: CHAT}] * 2


def test_a_readers_word_reaches_the_owner_with_the_read() -> None:
    cluster = calm()
    writer, reader = cluster.join(2), cluster.join(1)
    keys = placed(cluster, 0, 2, 2)
    stored(cluster, writer, keys, None)
    assert hints_of(cluster, keys[0]) == {0: NO_HINTS, 2: NO_HINTS}
    reply = answer(cluster, reader.processes[0], engine.Match, join_keys(keys), 0.0, True, "r", CHAT)
    fetch(cluster, reader, reply.lease, 2)
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, 2),)))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{0: CHAT, 1: CHAT, 2: NO_HINTS}] * 2
    # Without a word what is known stays.
    tell(cluster, reader.processes[0], engine.Release(((match(cluster, reader, keys).lease, 0, 2),)))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{0: CHAT, 1: CHAT, 2: NO_HINTS}] * 2


def test_a_late_word_reaches_every_copy_and_is_no_use() -> None:
    cluster = calm(eviction="lru")
    writer = cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    stored(cluster, writer, keys, CHAT)
    touched = {node: segment.touched for node, segment in copies(cluster, keys[0]).items()}
    tell(cluster, writer.processes[0], engine.Hint(join_keys(keys), OVER))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{0: CHAT_OVER, 2: CHAT_OVER}] * 2
    assert {node: segment.touched for node, segment in copies(cluster, keys[0]).items()} == touched
    cluster.check()


def test_a_late_word_about_what_is_not_here_goes_to_its_owner() -> None:
    cluster = calm()
    writer, other = cluster.join(2), cluster.join(1)
    keys = placed(cluster, 0, 1, 2)
    stored(cluster, writer, keys, CHAT)
    tell(cluster, other.processes[0], engine.Hint(join_keys(keys), OVER))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key)[0] for key in keys] == [CHAT_OVER] * 2


def test_a_late_word_about_a_lease_outlives_its_release() -> None:
    cluster = calm()
    writer, reader = cluster.join(2), cluster.join(1)
    keys = placed(cluster, 0, 2, 2)
    stored(cluster, writer, keys, None)
    reply = answer(cluster, reader.processes[0], engine.Match, join_keys(keys), 0.0, True, "r", CHAT)
    fetch(cluster, reader, reply.lease, 2)
    tell(cluster, reader.processes[0], engine.Hint(b"", CHAT_OVER, reply.lease))
    tell(cluster, reader.processes[0], engine.Release(((reply.lease, 0, 2),)))
    cluster.run_for(0.5)
    assert [hints_of(cluster, key) for key in keys] == [{0: CHAT_OVER, 1: CHAT_OVER, 2: NO_HINTS}] * 2


def test_another_tenants_word_reaches_nothing() -> None:
    cluster = calm()
    writer, stranger = cluster.join(0), cluster.join(0, tenant="blue")
    keys = placed(cluster, 0, 1)
    stored(cluster, writer, keys, CHAT)
    tell(cluster, stranger.processes[0], engine.Hint(join_keys(keys), OVER))
    cluster.run_for(0.5)
    assert set(hints_of(cluster, keys[0]).values()) == {CHAT}


def test_words_of_several_requests_are_told_apart() -> None:
    cluster = calm()
    writer = cluster.join(2)
    keys = placed(cluster, 0, 1, 3)
    stored(cluster, writer, keys, None)
    process = writer.processes[0]
    for key, hints in zip(keys, (CHAT, OVER, CHAT), strict=True):
        reply = answer(cluster, process, engine.Match, key, 0.0, True, "r", hints)
        tell(cluster, process, engine.Release(((reply.lease, 0, 1),)))
    cluster.run_for(0.5)
    touched = [message for message in said(cluster, 2, peer.Touched) if message.hints is not None]
    told = [
        (message.keys, replace(message.hints, access=NO_ACCESS)) for message in touched if message.hints is not None
    ]
    assert told == [(keys[0], CHAT), (keys[1], OVER), (keys[2], CHAT)]
