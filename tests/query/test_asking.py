"""The asking side over a socket whose other end the test holds: answers in time, late, wrong, or none."""

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
from tokenlake_query.asking import Asker, Peers
from tokenlake_query.tally import Tally

SHAPE = AttentionShape.of(LAYOUT, HEADS, SCALE)
TOKENS = (2, 3)
RESULT_BYTES = sum(TOKENS) * HEADS * (LAYOUT.value_dim * 4 + 4)
FOUND = bytes([Code.LOCAL, Code.LOCAL])


class Told:
    """A question that notes what it is told."""

    def __init__(self) -> None:
        self.wanted = True
        self.bytes = 0
        self.partials: dict[int, Partial] = {}
        self.lacking: list[int] = []

    def wants(self) -> bool:
        return self.wanted

    def received(self, nbytes: int) -> None:
        self.bytes += nbytes

    def arrived(self, index: int, partial: Partial) -> None:
        self.partials[index] = Partial(partial.out.copy(), partial.lse.copy())

    def missing(self, index: int) -> None:
        self.lacking.append(index)


class Scene:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.tally = Tally()
        self.asker = Asker(ours, "b", self.tally)
        self.raw = Raw(theirs, wire.ask_decoder)

    def ask(self) -> tuple[Told, int]:
        """Two parts; the question and its number."""
        told = Told()
        queries = [draw_queries(tokens, tokens) for tokens in TOKENS]
        views = [(number, tokens) for number, tokens in enumerate(TOKENS, 1)]
        payload = [array.reshape(-1).view(np.uint8).data for array in queries]
        sent = self.asker.ask(told, 1, SHAPE, "float32", views, payload)
        ask = self.raw.receive()
        assert (ask.layer, ask.dtype, ask.parts) == (1, "float32", ((1, 2), (2, 3)))
        assert self.raw.exactly(ask.nbytes) == b"".join(array.tobytes() for array in queries)
        assert sent > ask.nbytes
        return told, ask.number

    def says_something(self) -> None:
        """What changes nothing but that it lives."""
        self.raw.send(wire.Viewed(1 << 20, 0, b""))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.asker.close()
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


def test_results_come_in_any_order_and_each_to_its_question(scene: Scene) -> None:
    (first, one), (second, two) = scene.ask(), scene.ask()
    for number, seed in ((two, 2), (one, 1)):
        scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result(seed)[1])
    wait_until(lambda: len(first.partials) == len(second.partials) == 2, "both came")
    for told, seed in ((first, 1), (second, 2)):
        for index, part in enumerate(result(seed)[0]):
            assert np.array_equal(told.partials[index].out, part.out)
            assert np.array_equal(told.partials[index].lse, part.lse)
        assert told.bytes > RESULT_BYTES
        assert not told.lacking


def test_a_part_that_is_lost_there_is_missing(scene: Scene) -> None:
    told, number = scene.ask()
    parts, _ = result()
    payload = parts[1].out.tobytes() + parts[1].lse.tobytes()
    scene.raw.send(wire.Result(number, 1, bytes([Code.LOST, Code.LOCAL]), len(payload)), payload)
    wait_until(lambda: bool(told.partials and told.lacking), "it came")
    assert told.lacking == [0]
    assert np.array_equal(told.partials[1].out, parts[1].out)


def test_a_late_result_is_counted_and_dropped(scene: Scene) -> None:
    told, number = scene.ask()
    told.wanted = False
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(lambda: scene.tally["late_results"] == 1, "it came")
    assert not told.partials
    assert not told.lacking
    again, number = scene.ask()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(lambda: len(again.partials) == 2, "the stream goes on behind it")


@pytest.mark.parametrize(
    ("change", "codes", "nbytes"),
    [(1, FOUND, RESULT_BYTES), (0, FOUND[:1], RESULT_BYTES), (0, FOUND, RESULT_BYTES - 4), (0, FOUND, 1 << 40)],
)
def test_a_wrong_result_ends_the_connection_and_what_was_asked_is_missing(
    scene: Scene, change: int, codes: bytes, nbytes: int
) -> None:
    (told, number), (other, _) = scene.ask(), scene.ask()
    scene.raw.send(wire.Result(number + 2 * change, 1, codes, nbytes), bytes(100))
    wait_until(lambda: told.lacking == other.lacking == [0, 1], "both are told")
    assert not scene.asker.open
    later = Told()
    scene.asker.ask(later, 0, SHAPE, "float32", [(1, 1)], [draw_queries(0, 1).reshape(-1).view(np.uint8).data])
    assert later.lacking == [0], "at once"


def test_the_end_in_the_middle_of_a_result(scene: Scene) -> None:
    told, number = scene.ask()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1][:-1])
    scene.raw.sock.close()
    wait_until(lambda: told.lacking == [0, 1], "it is told")
    assert not told.partials


def test_who_owes_an_answer_is_not_asked_until_it_says_anything(scene: Scene) -> None:
    def answers() -> bool:
        return scene.asker.answers

    scene.asker.let_deadline_pass()
    assert answers(), "it owed nothing"
    _, number = scene.ask()
    scene.asker.let_deadline_pass()
    assert not answers()
    scene.says_something()
    wait_until(answers, "it lives")
    scene.asker.let_deadline_pass()
    scene.raw.send(wire.Result(number, 1, FOUND, RESULT_BYTES), result()[1])
    wait_until(answers, "it answered")
    scene.asker.let_deadline_pass()
    assert answers()


def test_views_are_opened_refused_or_unreachable(scene: Scene) -> None:
    def message(number: int) -> wire.OpenView:
        return wire.OpenView(number, "t", b"", bytes(32), (), b"", HEADS, SCALE)

    one, opened = scene.asker.open_view(message)
    two, refused = scene.asker.open_view(message)
    _, broken = scene.asker.open_view(message)
    assert [scene.raw.receive().view for _ in range(3)][:2] == [one, two]
    scene.raw.send(wire.Refused(two, "LayoutRefused", "another layout"))
    scene.raw.send(wire.Viewed(one, 1, bytes([Code.LOCAL])))
    assert opened.result(LIMIT_S) == bytes([Code.LOCAL])
    with pytest.raises(LayoutRefused, match="another layout"):
        refused.result(LIMIT_S)
    scene.raw.sock.close()
    with pytest.raises(Unreachable):
        broken.result(LIMIT_S)
    _, never = scene.asker.open_view(message)
    with pytest.raises(Unreachable):
        never.result(LIMIT_S)


def test_a_node_is_dialled_once_and_again_when_its_connection_ended() -> None:
    dialled: list[str] = []
    peers = Peers(dialled.append, Tally())
    first, second = peers.get("b"), peers.get("b")
    assert dialled == ["b"]
    ours, theirs = socket.socketpair()
    peers.connected("b", ours)
    asker = first.result(0)
    assert asker is second.result(0) is peers.get("b").result(0)
    asker.ask(Told(), 0, SHAPE, "float32", [(1, 1)], [draw_queries(0, 1).reshape(-1).view(np.uint8).data])
    asker.let_deadline_pass()
    with pytest.raises(DeadlinePassed):
        peers.get("b").result(0)
    theirs.close()
    wait_until(lambda: not asker.open, "it ended")
    third = peers.get("b")
    assert dialled == ["b", "b"]
    peers.unreached("b", "nobody there")
    with pytest.raises(Unreachable, match="nobody there"):
        third.result(0)
