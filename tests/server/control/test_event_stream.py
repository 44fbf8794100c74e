"""The event streams of real daemons: snapshots, changes in order, cursors, tenants, changes of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, store
from tests.server.control.scene import certificates, local, remote, served
from tests.server.scene import OF_THIS_USER, RED, tenants
from tokenlake_client import Pool
from tokenlake_client.control import Control
from tokenlake_client.control.client import CursorLost
from tokenlake_proto.v1 import events_pb2
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


class Follower:
    """What a reader of the events believes that a node has."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.cursor: events_pb2.Cursor | None = None
        self.complete = False
        self.rings: list[tuple[int, list[str]]] = []

    def take(self, message: events_pb2.SubscribeResponse) -> None:
        if message.HasField("snapshot"):
            self.held |= {each.key for each in message.snapshot.segments}
            self.complete |= message.snapshot.complete
            if message.snapshot.HasField("ring"):
                self.rings.append((message.snapshot.ring.epoch, sorted(message.snapshot.ring.members)))
        for change in message.changes:
            if change.HasField("stored"):
                self.held.add(change.stored.key)
            elif change.HasField("gone"):
                self.held.discard(change.gone.key)
            else:
                self.rings.append((change.ring.epoch, sorted(change.ring.members)))
        self.cursor = message.cursor

    def follow(self, stream: Iterator[events_pb2.SubscribeResponse], held: set[bytes]) -> None:
        """Read until the follower believes that the node has `held`."""
        for message in stream:
            self.take(message)
            if self.complete and self.held == held:
                return
        raise AssertionError("the stream ended")


def keys_of(pool: Pool, *prompts: Prompt) -> set[bytes]:
    return {bytes(key) for prompt in prompts for key in pool.prefix(prompt.tokens).keys}


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with daemons(1) as cluster:
        yield cluster


@pytest.fixture
def control(one: Cluster) -> Iterator[Control]:
    with local(one.nodes[0]) as control:
        control.evict(everything=True)
        yield control


def test_a_snapshot_comes_first_then_the_changes(one: Cluster, control: Control) -> None:
    first, second = Prompt(1, 3), Prompt(2, 2)
    with one.connect(0, LAYOUT) as pool:
        store(pool, first)
        stream, follower = control.events(), Follower()
        follower.follow(stream, keys_of(pool, first))
        assert follower.rings == [(0, ["node0"])]
        store(pool, second)
        follower.follow(stream, keys_of(pool, first, second))
        control.evict(keys=pool.prefix(first.tokens).keys)
        follower.follow(stream, keys_of(pool, second))
        stream.close()


def test_what_a_reader_believes_is_what_the_node_has(one: Cluster, control: Control) -> None:
    """After 3,000 stores and evictions, with a reader that comes and goes."""
    with one.connect(0, LAYOUT) as pool:
        follower, prompts = Follower(), [Prompt(100 + number, 100) for number in range(30)]
        follower.follow(control.events(), set())
        for number, prompt in enumerate(prompts):
            store(pool, prompt)
            if number % 7 == 0:
                stream = control.events(follower.cursor)
                follower.take(next(stream))
                stream.close()
        control.status()
        held = set()
        for prompt in prompts:
            for key in pool.prefix(prompt.tokens).keys:
                with pool.match([key], deadline_s=2.0) as lease:
                    held |= {bytes(key)} if lease.hits else set()
        assert 0 < len(held) < 3000
        follower.follow(control.events(follower.cursor), held)


def test_a_cursor_that_cannot_be_continued(one: Cluster, control: Control) -> None:
    """A cursor of another life or out of range is told to take a snapshot."""
    message = next(control.events())
    for wrong in (
        events_pb2.Cursor(incarnation=message.cursor.incarnation - 1, sequence=message.cursor.sequence),
        events_pb2.Cursor(incarnation=message.cursor.incarnation, sequence=message.cursor.sequence + 1000),
    ):
        with pytest.raises(CursorLost, match="take a snapshot"):
            next(control.events(wrong))


def test_a_reader_sees_its_own_tenant_only(tmp_path: Path) -> None:

    file = tenants(tmp_path, blue=OF_THIS_USER)
    cluster = Cluster(1, "4MiB", "1MiB", config=file)
    (address,) = served(cluster).values()
    ca = cluster.directory / "ca"
    cluster.deadlines = PATIENT
    with (
        cluster,
        Pool.connect(cluster.nodes[0].socket, LAYOUT, RED, deadlines=PATIENT) as red,
        cluster.connect(0, LAYOUT) as blue,
    ):
        store(red, Prompt(1, 2))
        store(blue, Prompt(1, 3))
        for tenant, pool, count in (("red", red, 2), ("blue", blue, 3)):
            with remote(address, "node0", certificates(ca, f"r-{tenant}", "reader", tenant)) as control:
                stream, follower = control.events(), Follower()
                follower.follow(stream, keys_of(pool, Prompt(1, count)))
                store(red, Prompt(2, 1))
                store(blue, Prompt(3, 1))
                follower.follow(stream, keys_of(pool, Prompt(1, count), Prompt(2 if tenant == "red" else 3, 1)))
                stream.close()
                with local(cluster.nodes[0]) as operator:
                    operator.evict(keys=red.prefix(Prompt(2, 1).tokens).keys, tenant="red")
                    operator.evict(keys=blue.prefix(Prompt(3, 1).tokens).keys, tenant="blue")
