"""A peer client over a socket whose other end the test holds: answers in time, late, wrong, or none."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tests.query.raw import Raw
from tests.query.scene import HEADS, LAYOUT, SCALE, draw_queries
from tests.robustness.live import LIMIT_S, wait_until
from tokenlake.attention import AttentionShape, Partial
from tokenlake.errors import DeadlinePassed, LayoutRefused, Unreachable
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake_query.counters import Counters
from tokenlake_query.peer_client import PeerClient, PeerClients

SHAPE = AttentionShape.of(LAYOUT, HEADS, SCALE)
TOKENS = (2, 3)
RESULT_BYTES = sum(TOKENS) * HEADS * (LAYOUT.value_dim * 4 + 4)
FOUND = bytes([Code.LOCAL, Code.LOCAL])


class Recorder:
    """A result handler that records its calls."""

    def __init__(self) -> None:
        self.active = True
        self.bytes = 0
        self.partials: dict[int, Partial] = {}
        self.lacking: list[int] = []

    def wanted(self) -> bool:
        return self.active

    def received(self, nbytes: int) -> None:
        self.bytes += nbytes

    def arrived(self, index: int, partial: Partial) -> None:
        self.partials[index] = Partial(partial.out.copy(), partial.lse.copy())

    def missing(self, index: int) -> None:
        self.lacking.append(index)


class Scene:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.counters = Counters()
        self.client = PeerClient(ours, "b", self.counters)
        self.raw = Raw(theirs, wire.ask_decoder)

    def ask(self) -> tuple[Recorder, int]:
        """Ask about two parts; returns the handler and the number of the request."""
        handler = Recorder()
        queries = [draw_queries(tokens, tokens) for tokens in TOKENS]
        views = [(number, tokens) for number, tokens in enumerate(TOKENS, 1)]
        payload = [array.reshape(-1).view(np.uint8).data for array in queries]
        sent = self.client.ask(handler, 1, SHAPE, "float32", views, payload)
        ask = self.raw.receive()
        assert (ask.layer, ask.dtype, ask.parts) == (1, "float32", ((1, 2), (2, 3)))
        assert self.raw.exactly(ask.nbytes) == b"".join(array.tobytes() for array in queries)
        assert sent > ask.nbytes
        return handler, ask.number

    def send_unrelated_message(self) -> None:
        """A message of the peer that answers no request."""
        self.raw.send(wire.Viewed(1 << 20, 0, b""))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.client.close()
    scene.raw.sock.close()


def result(seed: int = 0) -> tuple[list[Partial], bytes]:
    draw = np.random.default_rng(seed)
    parts = [
        Partial(
            draw.standard_normal((tokens, HEADS, LAYOUT.value_dim), np.float32),
            draw.standard_normal((tokens, HEADS), np.float32),
        )
        for tokens in TOKENS
    ]
    return parts, b"".join([part.out.tobytes() for part in parts] + [part.lse.tobytes() for part in parts])


def test_results_in_any_order_reach_their_handlers(scene: Scene) -> None:
    (first, one), (second, two) = scene.ask(), scene.ask()
    for number, seed in ((two, 2), (one, 1)):
        scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result(seed)[1])
    wait_until(lambda: len(first.partials) == len(second.partials) == 2, "both came")
    for handler, seed in ((first, 1), (second, 2)):
        for index, part in enumerate(result(seed)[0]):
            assert np.array_equal(handler.partials[index].out, part.out)
            assert np.array_equal(handler.partials[index].lse, part.lse)
        assert handler.bytes > RESULT_BYTES
        assert not handler.lacking


def test_a_lost_part_is_missing(scene: Scene) -> None:
    handler, number = scene.ask()
    parts, _ = result()
    payload = parts[1].out.tobytes() + parts[1].lse.tobytes()
    scene.raw.send(wire.Result(number, 1, bytes([Code.LOST, Code.LOCAL]), len(payload)), payload)
    wait_until(lambda: bool(handler.partials and handler.lacking), "it came")
    assert handler.lacking == [0]
    assert np.array_equal(handler.partials[1].out, parts[1].out)


def test_a_late_result_is_counted_and_dropped(scene: Scene) -> None:
    handler, number = scene.ask()
    handler.active = False
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(lambda: scene.counters["late_results"] == 1, "it came")
    assert not handler.partials
    assert not handler.lacking
    again, number = scene.ask()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(lambda: len(again.partials) == 2, "the stream goes on behind it")


@pytest.mark.parametrize(
    ("change", "codes", "nbytes"),
    [(1, FOUND, RESULT_BYTES), (0, FOUND[:1], RESULT_BYTES), (0, FOUND, RESULT_BYTES - 4), (0, FOUND, 1 << 40)],
)
def test_a_wrong_result_ends_the_connection(scene: Scene, change: int, codes: bytes, nbytes: int) -> None:
    (handler, number), (other, _) = scene.ask(), scene.ask()
    scene.raw.send(wire.Result(number + 2 * change, 1, codes, nbytes), bytes(100))
    wait_until(lambda: handler.lacking == other.lacking == [0, 1], "both are handler")
    assert not scene.client.open
    later = Recorder()
    scene.client.ask(later, 0, SHAPE, "float32", [(1, 1)], [draw_queries(0, 1).reshape(-1).view(np.uint8).data])
    assert later.lacking == [0], "the closed client answers at once"


def test_connection_ends_within_a_result(scene: Scene) -> None:
    handler, number = scene.ask()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1][:-1])
    scene.raw.sock.close()
    wait_until(lambda: handler.lacking == [0, 1], "it is handler")
    assert not handler.partials


def test_an_overdue_peer_is_unusable_until_it_sends(scene: Scene) -> None:
    def usable() -> bool:
        return scene.client.usable

    scene.client.deadline_missed()
    assert usable(), "the peer owed no answer"
    _, number = scene.ask()
    scene.client.deadline_missed()
    assert not usable()
    scene.send_unrelated_message()
    wait_until(usable, "it lives")
    scene.client.deadline_missed()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(usable, "it answered")
    scene.client.deadline_missed()
    assert usable()


def test_views_are_opened_refused_or_unreachable(scene: Scene) -> None:
    def message(number: int) -> wire.OpenView:
        return wire.OpenView(number, "t", b"", bytes(32), (), b"", HEADS, SCALE)

    one, opened = scene.client.open_view(message)
    two, refused = scene.client.open_view(message)
    _, broken = scene.client.open_view(message)
    assert [scene.raw.receive().view for _ in range(3)][:2] == [one, two]
    scene.raw.send(wire.Refused(two, "LayoutRefused", "another layout"))
    scene.raw.send(wire.Viewed(one, 1, bytes([Code.LOCAL])))
    assert opened.result(LIMIT_S) == bytes([Code.LOCAL])
    with pytest.raises(LayoutRefused, match="another layout"):
        refused.result(LIMIT_S)
    scene.raw.sock.close()
    with pytest.raises(Unreachable):
        broken.result(LIMIT_S)
    _, never = scene.client.open_view(message)
    with pytest.raises(Unreachable):
        never.result(LIMIT_S)


def test_a_node_is_dialled_again_after_its_connection() -> None:
    dialled: list[tuple[str, str]] = []
    peers = PeerClients(lambda node, tenant: dialled.append((node, tenant)), Counters())
    first, second = peers.get("b", "red"), peers.get("b", "red")
    assert dialled == [("b", "red")]
    ours, theirs = socket.socketpair()
    peers.connected("b", "red", ours)
    client = first.result(0)
    assert client is second.result(0) is peers.get("b", "red").result(0)
    client.ask(Recorder(), 0, SHAPE, "float32", [(1, 1)], [draw_queries(0, 1).reshape(-1).view(np.uint8).data])
    client.deadline_missed()
    with pytest.raises(DeadlinePassed):
        peers.get("b", "red").result(0)
    theirs.close()
    wait_until(lambda: not client.open, "it ended")
    third = peers.get("b", "red")
    assert dialled == [("b", "red")] * 2
    peers.unreached("b", "red", "nobody there")
    with pytest.raises(Unreachable, match="nobody there"):
        third.result(0)


def test_a_failed_dial_delays_no_later_view() -> None:
    """Only the first caller waits for the dial; the node is dialled again while later callers go on without it."""
    dialled: list[str] = []
    peers = PeerClients(lambda node, tenant: dialled.append(tenant), Counters())
    first = peers.get("b", "red")
    peers.unreached("b", "red", "no route")
    with pytest.raises(Unreachable, match="no route"):
        first.result(0)

    def dialled_again() -> bool:
        # Another tenant's views do not wait for the node either.
        for tenant in ("red", "blue"):
            with pytest.raises(Unreachable, match="no route"):
                peers.get("b", tenant).result(0)
        return dialled.count("red") == 2

    wait_until(dialled_again, "the node is dialled again")
    ours, theirs = socket.socketpair()
    with theirs:
        peers.connected("b", "red", ours)
        client = peers.get("b", "red").result(0)
        client.close()
    assert dialled.count("red") == 2
