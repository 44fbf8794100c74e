"""Real daemons and real sockets: llm-d's and Dynamo's belief about a node equals what the node has."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

import zmq

from tests.robustness.live import LAYOUT, LIMIT_S, pid_of, total
from tests.server.kv_events.readers import Llmd, Subscriber, events_of
from tests.server.kv_events.scene import (
    BLOCK,
    MODEL,
    Dynamo,
    Prompts,
    Stream,
    agree,
    beliefs,
    expected,
    held,
    publishing,
    python,
    store,
    until,
)
from tokenlake_client import Pool
from tokenlake_client.control import Control
from tokenlake_operator.doctor.running import check_node
from tokenlake_operator.nodes import Node as OperatorNode
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

__all__ = ["python"]  # a fixture

STORES = 10_000


def fill_pool(pool: Pool, prompts: Prompts, segments: int) -> list[list[int]]:
    """Store prompts until so many segments were committed. Returns them."""
    first = len(prompts.all)
    while segments > 0:
        segments -= store(pool, prompts.new())
    return prompts.all[first:]


@pytest.mark.rest
@pytest.mark.timeout(240)
def test_the_beliefs_after_10_000_stores_and_evictions(python: Path) -> None:
    """Dynamo's own indexer and llm-d's index, which also miss messages: a few, and more than the daemon keeps."""
    with publishing(encoding="array", module="tests.server.kv_events.small_daemon") as (cluster, (stream,)):
        node, router, prompts = cluster.nodes[0], Llmd(BLOCK), Prompts()
        with (
            cluster.connect(0, LAYOUT) as pool,
            Subscriber(*stream.endpoints, router.take) as subscriber,
            Dynamo(cluster.directory, [stream], python) as dynamo,
        ):

            def both_agree() -> None:
                asked = prompts.all[-300:] + prompts.all[:: max(1, len(prompts.all) // 200)]
                truth = expected(pool, held(node), asked)
                until(truth, lambda: beliefs(router, stream, asked))
                until(truth, lambda: [dynamo.tokens(tokens) for tokens in asked])

            fill_pool(pool, prompts, STORES)
            assert node.metrics()["tokenlake_evicted_segments_total"] > STORES / 2
            both_agree()
            assert not router.orphans
            # A few messages are missed: the replay has them.
            subscriber.lose = True
            dynamo.lose(True)
            fill_pool(pool, prompts, 40)
            time.sleep(0.2)
            subscriber.lose = False
            fill_pool(pool, prompts, 10)
            agree(node, stream, pool, router, prompts.all[-300:])
            start, came = subscriber.replays[-1]
            assert min(start, came) > 0
            dynamo.lose(False)
            both_agree()
            # More messages are missed than are kept: all blocks are told anew.
            restated = restatements(node)
            subscriber.lose = True
            dynamo.lose(True)
            fill_pool(pool, prompts, 1500)
            time.sleep(0.2)
            subscriber.lose = False
            fill_pool(pool, prompts, 10)
            agree(node, stream, pool, router, prompts.all[-300:])
            assert subscriber.replays[-1][1] == 0
            assert restatements(node) > restated
            dynamo.lose(False)
            both_agree()


def restatements(node: Node) -> float:
    return node.metrics()[f'tokenlake_kv_event_restatements{{model="{MODEL}",tenant="default"}}']


def test_evictions_by_an_operator_and_a_restart(tmp_path: Path) -> None:
    with publishing() as (cluster, (stream,)):
        node, router, prompts = cluster.nodes[0], Llmd(BLOCK), Prompts()
        with Subscriber(*stream.endpoints, router.take) as subscriber:
            with cluster.connect(0, LAYOUT) as pool:
                fill_pool(pool, prompts, 50)
                agree(node, stream, pool, router, prompts.all)
                with Control.local(node.socket.with_suffix(".control"), call_s=LIMIT_S) as control:
                    control.evict(everything=True)
                until([0] * len(prompts.all), lambda: beliefs(router, stream, prompts.all))
                fill_pool(pool, prompts, 50)
                agree(node, stream, pool, router, prompts.all)
            last = subscriber.last
            node.kill()
            node.start()
            cluster.wait_ready()
            until([0] * len(prompts.all), lambda: beliefs(router, stream, prompts.all))
            with cluster.connect(0, LAYOUT) as pool:
                fill_pool(pool, prompts, 50)
                agree(node, stream, pool, router, prompts.all)
            assert subscriber.last > last, "the numbers of a later start are higher"


def test_a_reader_that_comes_later() -> None:
    """llm-d does not ask for missed messages."""
    with publishing() as (cluster, (stream,)), cluster.connect(0, LAYOUT) as pool:
        prompts, router = Prompts(), Llmd(BLOCK)
        fill_pool(pool, prompts, 200)
        context = zmq.Context()
        reader = context.socket(zmq.SUB)
        reader.connect(stream.endpoints[0])
        reader.subscribe(stream.topic.encode())
        truth = expected(pool, held(cluster.nodes[0]), prompts.all)

        def believed() -> list[int]:
            while reader.poll(10):
                topic, _, payload = reader.recv_multipart()
                router.take(topic, payload)
            return beliefs(router, stream, prompts.all)

        until(truth, believed)
        context.destroy(linger=0)


def test_copies_from_another_node_are_published() -> None:
    with publishing(2) as (cluster, streams):
        routers = [Llmd(BLOCK) for _ in streams]
        prompts = Prompts()
        with (
            cluster.connect(0, LAYOUT) as writer,
            cluster.connect(1, LAYOUT) as reader,
            Subscriber(*streams[0].endpoints, routers[0].take),
            Subscriber(*streams[1].endpoints, routers[1].take),
        ):
            fill_pool(writer, prompts, 60)
            for tokens in prompts.all[::2]:
                # On a busy machine some of the segments come too late.
                with reader.match(reader.prefix(tokens).keys, deadline_s=LIMIT_S) as lease:
                    lease.fetch(0, lease.hits)
            for node, stream, router in zip(cluster.nodes, streams, routers, strict=True):
                agree(node, stream, writer, router, prompts.all)
            assert all(any(beliefs(router, each, prompts.all)) for each, router in zip(streams, routers, strict=True))


def test_segments_that_are_read_back_from_disk(tmp_path: Path) -> None:
    """Their tokens come from the disk too."""
    text = f'disk = "{tmp_path}"\ndisk_writes_per_day = 0\n'
    with publishing(memory="2MiB", text=text) as (cluster, (stream,)):
        node, router, prompts = cluster.nodes[0], Llmd(BLOCK), Prompts()
        until(1, lambda: total(node, "tokenlake_disk_serving"))
        with cluster.connect(0, LAYOUT) as pool, Subscriber(*stream.endpoints, router.take):
            fill_pool(pool, prompts, 600)
            until(True, lambda: total(node, "tokenlake_disk_kept_segments_total") > 50)
            agree(node, stream, pool, router, prompts.all)
            read = 0
            for tokens in prompts.all:
                before = total(node, "tokenlake_disk_read_segments_total")
                with pool.match(pool.prefix(tokens).keys, deadline_s=LIMIT_S) as lease:
                    lease.fetch(deadline_s=LIMIT_S)
                read += total(node, "tokenlake_disk_read_segments_total") > before
            assert read > 10
            agree(node, stream, pool, router, prompts.all)
            assert total(node, "tokenlake_kv_event_without_tokens") == 0


def test_readers_that_never_read_and_garbage_do_not_hurt(tmp_path: Path) -> None:
    """Connections that read nothing, malformed requests and frames: memory is bounded, others are served."""
    with publishing() as (cluster, (stream,)), cluster.connect(0, LAYOUT) as pool:
        node, prompts, router = cluster.nodes[0], Prompts(), Llmd(BLOCK)
        context = zmq.Context()
        silent = []
        for _ in range(20):
            each = context.socket(zmq.SUB)
            each.setsockopt(zmq.RCVHWM, 1)
            each.connect(stream.endpoints[0])
            each.subscribe(b"")
            silent.append(each)
        noisy = context.socket(zmq.DEALER)
        noisy.setsockopt(zmq.SNDHWM, 10)
        noisy.connect(stream.endpoints[1])
        for frames in ([b""], [b"", b"1234567"], [b"x", bytes(8)], [os.urandom(9)] * 5, [b"", bytes(8), b""]):
            noisy.send_multipart(frames)
        for _ in range(5):
            noisy.send_multipart([b"", bytes(4096)])
        for endpoint in stream.endpoints:
            address = endpoint.removeprefix("tcp://").split(":")
            for garbage in (os.urandom(5000), b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(500), b""):
                with socket.create_connection((address[0], int(address[1])), 5) as raw:
                    raw.sendall(garbage)
        # Replays whose readers take no message.
        hungry = [context.socket(zmq.DEALER) for _ in range(20)]
        for each in hungry:
            each.setsockopt(zmq.RCVHWM, 1)
            each.connect(stream.endpoints[1])
        fill_pool(pool, prompts, 200)
        before = resident(pid_of(node))
        with Subscriber(*stream.endpoints, router.take):
            for _ in range(8):
                for each in hungry:
                    each.send_multipart([b"", bytes(8)])
                fill_pool(pool, prompts, 500)
            agree(node, stream, pool, router, prompts.all[-200:])
        assert resident(pid_of(node)) - before < 64 << 20
        context.destroy(linger=0)


def resident(pid: int) -> int:
    """The private resident memory of a process, in bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGESIZE")


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Cleared]
    data_parallel_rank: int | None = None


def test_the_replay_socket_answers_as_that_of_vllm() -> None:
    """With messages that vLLM decodes. Only segments of the model that is opted in are published."""
    with publishing() as (cluster, (stream,)), cluster.connect(0, LAYOUT) as pool:
        assert pool.link.published == (MODEL,)
        assert pool.engine.contents(pool.prefix(), [], range(0), "another model") == ()
        prompts = Prompts()
        assert store(pool, prompts.new(), "another model")
        tokens = Prompts(2).new()
        store(pool, tokens)
        labels = f'{{model="{MODEL}",tenant="default"}}'
        published = len(tokens) // LAYOUT.segment_tokens
        until(published, lambda: cluster.nodes[0].metrics()[f"tokenlake_kv_event_segments{labels}"])
        assert cluster.nodes[0].metrics()[f"tokenlake_kv_event_without_tokens{labels}"] > 0

        def replayed() -> list[list[bytes]]:
            found: list[list[bytes]] = []
            with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
                asking.setsockopt(zmq.LINGER, 0)
                asking.connect(stream.endpoints[1])
                asking.send_multipart([b"", bytes(8)])
                while not found or found[-1][-1]:
                    assert asking.poll(int(LIMIT_S * 1000))
                    empty, *frames = asking.recv_multipart()
                    assert empty == b""
                    found.append(frames)
            return found

        until(True, lambda: any(b"BlockStored" in frames[-1] for frames in replayed()))
        *found, end = replayed()
        numbers = [int.from_bytes(word, "big") for _, word, _ in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert {topic for topic, _, _ in found} == {stream.topic.encode()}
        assert events_of(found[0][2])[0] == {"type": "AllBlocksCleared"}
        assert int.from_bytes(end[1], "big", signed=True) == -1
        events = [event for each in found for event in msgspec.msgpack.decode(each[2], type=Batch).events]
        stored = {each.block_hashes[0]: each for each in events if isinstance(each, Stored)}
        assert [token for each in stored.values() for token in each.token_ids] == tokens


def test_two_streams_of_one_tenant_and_addresses_that_are_taken(tmp_path: Path) -> None:
    other = Stream("node0")
    text = other.toml(model="other", topic="kv@pool:x@other", medium="EXTERNAL")
    with publishing(text=text) as (cluster, _), cluster.connect(0, LAYOUT) as pool:
        assert set(pool.link.published) == {MODEL, "other"}
        seen: list[tuple[bytes, bytes]] = []
        with Subscriber(*other.endpoints, lambda topic, payload: seen.append((topic, payload))):
            store(pool, Prompts(7).new(), MODEL)
            store(pool, Prompts(8).new(), "other")
            until(True, lambda: any(b"BlockStored" in payload for _, payload in seen))
        assert {topic for topic, _ in seen} == {b"kv@pool:x@other"}
        (stored,) = [each for _, payload in seen for each in events_of(payload) if each["type"] == "BlockStored"][:1]
        assert stored["medium"] == "EXTERNAL"
        same = {name: cluster.nodes[0].settings[name] for name in ("config", "memory", "region-size")}
        second = Node("second", tmp_path, {**same, "listen": "127.0.0.1:0"})
        second.start()
        assert second.process is not None
        assert second.process.wait(LIMIT_S)
        assert "'kv_events'" in second.log.read_text()


def seen(node: Node) -> tuple[int, list[str]]:
    """The published segments of the only stream, and what `doctor` finds about it."""
    with Control.local(node.socket.with_suffix(".control"), call_s=LIMIT_S) as control:
        answers = OperatorNode(node.name, control, control.status(), control.cluster(), 0.0, 0.0)
        (stream,) = answers.status.kv_events
        found = list(check_node(answers))
        return stream.segments, [f"{each.problem}: {each.cure}" for each in found if each.check == "kv-events-unseen"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"model": "a/typo"}, f"no engine serves 'a/typo'; engines of tenant 'default' serve '{MODEL}': set 'model'"),
        ({"block_tokens": 7}, "segments have 16 tokens, no multiple of 'block_tokens' = 7: set 'block_tokens'"),
    ],
)
def test_a_stream_in_which_routers_see_nothing(given: dict[str, Any], found: str) -> None:
    """`doctor` and `status` say why, by name; where routers see segments there is no finding."""
    with publishing(**given) as (cluster, _), cluster.connect(0, LAYOUT) as pool:
        assert seen(cluster.nodes[0]) == (0, [])
        store(pool, Prompts().new())
        until(True, lambda: any(found in each for each in seen(cluster.nodes[0])[1]))
        assert seen(cluster.nodes[0])[0] == 0
    with publishing() as (cluster, _), cluster.connect(0, LAYOUT) as pool:
        store(pool, Prompts(1).new(), "another")
        store(pool, Prompts(2).new())
        until(True, lambda: seen(cluster.nodes[0])[0] > 0)
        assert not seen(cluster.nodes[0])[1]
