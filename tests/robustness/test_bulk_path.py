"""The bulk path to a node is dead while its control connection answers, or a thread cannot be started."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    accounted,
    daemons,
    match,
    read,
    store,
    wait_told,
    wait_until,
)
from tests.robustness.matrix.proxy import Drop
from tests.robustness.matrix.world import World, world
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.hints import Hints
from tokenlake.wire import Code

pytestmark = [pytest.mark.live, pytest.mark.rest]

DEAD, HEADERS = Drop(("up", "down")), Drop(("down",), "raw")
"""No byte passes; the header of each reply passes, and no byte of a segment."""


def stored(at: World, number: int, count: int, segments: int = 1) -> list[Prompt]:
    """New prompts that the engine of node `number` has stored; the directory nodes know their owner."""
    prompts = [Prompt(50_000 + 1000 * number + seed, segments) for seed in range(count)]
    for prompt in prompts:
        assert at.engines[number].store(prompt, patience=LIMIT_S, hints=Hints(priority=1)) == {Code.COMMITTED}
    wait_told(at.cluster)
    return prompts


@pytest.mark.parametrize("fault", [DEAD, HEADERS], ids=["dead", "headers"])
def test_the_same_fetch_uses_a_copy_of_a_sound_node(fault: Drop) -> None:
    with world(2, nodes=3, linked=True) as at:
        reader, _, other = at.engines
        prompts = stored(at, 1, 24)
        wait_until(lambda: other.whole(prompts), "node 2 has copies")
        # A fetch asks the candidates of a key for copies. The directory node would lease its copy to the match.
        ring = Ring(RingRecord.of({node.name: 1 for node in at.nodes}))
        pairs = [ring.candidates(reader.pool.prefix(prompt.tokens).keys[0])[0] for prompt in prompts]
        copied = [prompt for prompt, pair in zip(prompts, pairs, strict=True) if pair[1] == "node2"]
        assert copied
        leases = [match(reader.pool, prompt) for prompt in copied]
        assert [lease.codes for lease in leases] == [bytes([Code.REMOTE])] * len(copied)
        assert {name for lease in leases for name in lease.nodes()} == {"node1"}
        at.links[1].fault = fault
        for prompt, lease in zip(copied, leases, strict=True):
            arrays = lease.fetch(deadline_s=4.0)
            assert len(arrays) == 1
            reader.check(prompt, arrays)
            del arrays
            lease.release()
        assert reader.wrong == 0


@contextlib.contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """A listener at `port` whose backlog is full, so that the kernel drops further attempts to connect."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield


def test_a_node_that_drops_connects_leaves_threads_for_others() -> None:
    """Eight fetches wait for a connection that is never made; a fetch from another node does not."""
    # With this setting the node may take long to answer, so that the fetches last until the assertion.
    with world(3, nodes=3, linked=True, suspect_ms="60000") as at:
        reader = at.engines[0]
        lost, found = stored(at, 1, 8), stored(at, 2, 1, segments=4)
        leases = [match(reader.pool, prompt) for prompt in lost]
        assert [lease.codes for lease in leases] == [bytes([Code.REMOTE])] * 8
        with contextlib.ExitStack() as stack:
            at.links[1].deafen()
            stack.enter_context(full_backlog(at.links[1].port))
            threads = [threading.Thread(target=lease.fetch, kwargs={"deadline_s": 8.0}) for lease in leases]
            for thread in threads:
                thread.start()
            transfers = 'tokenlake_map_entries{map="transfers"}'
            wait_until(lambda: at.nodes[0].metrics()[transfers] == 8, "eight fetches are under way")
            with match(reader.pool, found[0]) as lease:
                arrays = lease.fetch(deadline_s=PATIENT_S)
                assert len(arrays) == 4
                reader.check(found[0], arrays)
                del arrays
            assert at.nodes[0].metrics()[transfers] == 8
            for thread in threads:
                thread.join(LIMIT_S)
        assert reader.wrong == 0


@pytest.mark.parametrize("fault", ["threads", "sinks"])
@pytest.mark.parametrize("number", [0, 1], ids=["receiver", "sender"])
def test_a_daemon_that_cannot_carry_out_a_transfer_keeps_no_slot(number: int, fault: str, tmp_path: Path) -> None:
    """Neither a slot nor a connection nor a fetch waits for a thread that does not exist."""
    file = tmp_path / "fault"
    with daemons(2) as cluster:
        cluster.nodes[number].kill()
        cluster.nodes[number].start("tests.robustness.faulty_daemon", fault=str(file))
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as reader, cluster.connect(1, LAYOUT) as writer:
            prompts = [Prompt(70_000 + seed, 2) for seed in range(4)]
            for prompt in prompts:
                assert store(writer, prompt) == bytes([Code.COMMITTED]) * 2
            wait_told(cluster)
            leases = [match(reader, prompt) for prompt in prompts]
            assert [lease.hits for lease in leases] == [2] * 4
            file.write_text(fault)
            for lease in leases:
                lease.fetch(deadline_s=0.2)
                lease.release()
            for node in cluster.nodes:
                wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]
            file.write_text("")
            wait_until(lambda: all(read(reader, prompt) == 2 for prompt in prompts), "all is read")
            for node in cluster.nodes:
                wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]
