"""The state of a stream: what a router believes equals what the node has, for any order of stores and evictions."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from tests.server.kv_events.readers import Llmd
from tokenlake.content import contents_of
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_server.kv_events.blocks import ROOT_S, Blocks
from tokenlake_server.kv_events.encoding import ENCODINGS, AllBlocksCleared, encode

SEGMENT, BLOCK = 8, 4
MODEL, POD = "m", "node:a"
TOPIC = f"kv@{POD}@{MODEL}".encode()
ROOTS = [SegmentKey(bytes([number]) * 32) for number in (1, 2)]
REMAINDER = 3


def prompt(numbers: list[int], root: SegmentKey = ROOTS[0]) -> Prefix:
    """The keys of a prompt with one number for each of its segments."""
    chain = Prefix(root, SEGMENT)
    chain.extend(tokens_of(numbers))
    return chain


def tokens_of(numbers: list[int]) -> list[int]:
    return [1000 * number + at for number in numbers for at in range(SEGMENT)]


TREE = [[a, b, c] for a in range(2) for b in range(2) for c in range(2)]
SEGMENTS = sorted({tuple(path[:depth]) for path in TREE for depth in (1, 2, 3)})


class Node:
    """A stream, the segments that its node has, and a router that reads it."""

    def __init__(self, encoding: str = "map") -> None:
        self.blocks = Blocks(MODEL, BLOCK, "CPU")
        self.held: set[tuple[int, ...]] = set()
        self.router = Llmd(BLOCK)
        self._encoding = encoding

    def store(self, path: tuple[int, ...], now: float = 0.0, root: SegmentKey = ROOTS[0]) -> None:
        chain = prompt(list(path), root)
        last = len(path) - 1
        (content,) = contents_of(chain, tokens_of(list(path)), range(last, last + 1), MODEL)
        self.blocks.offer(chain.keys[last], content)
        self.blocks.stored(chain.keys[last], now)
        if root is ROOTS[0]:
            self.held.add(path)
        self.tell()

    def evict(self, path: tuple[int, ...], root: SegmentKey = ROOTS[0]) -> None:
        self.blocks.gone(prompt(list(path), root).keys[-1])
        if root is ROOTS[0]:
            self.held.discard(path)
        self.tell()

    def tell(self) -> None:
        if events := self.blocks.take():
            self.router.take(TOPIC, encode(events, self._encoding))

    def restate(self, part: int = 2) -> None:
        for events in self.blocks.restate(part):
            self.router.take(TOPIC, encode(events, self._encoding))

    def check(self, held: set[tuple[int, ...]] | None = None) -> None:
        held = self.held if held is None else held
        for path in TREE:
            depth = next((d for d in range(3) if tuple(path[: d + 1]) not in held), 3)
            assert self.router.tokens(tokens_of(path), MODEL, POD) == depth * SEGMENT
        assert not self.router.orphans


@given(st.data(), st.sampled_from(ENCODINGS))
def test_the_belief_equals_the_content_after_each_event(data: st.DataObject, encoding: str) -> None:
    node = Node(encoding)
    for _ in range(data.draw(st.integers(0, 40))):
        path = data.draw(st.sampled_from(SEGMENTS))
        match data.draw(st.sampled_from("ssser")):
            case "s":
                node.store(path)
            case "e":
                node.evict(path)
            case "r":
                node.router = Llmd(BLOCK)
                node.restate()
        node.check()
    while node.held:
        node.evict(node.held.copy().pop())
    node.check()
    assert not node.blocks.published


def test_the_parent_is_the_last_block_of_the_segment_before() -> None:
    state = Blocks(MODEL, BLOCK, "EXTERNAL")
    chain = prompt([1, 2])
    for key, content in zip(chain.keys, contents_of(chain, tokens_of([1, 2]), range(2), MODEL, "lora"), strict=True):
        state.offer(key, content)
        state.stored(key, 0.0)
    first, second = map(msgspec.structs.asdict, state.take())
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert (second["token_ids"], second["block_size"]) == (tokens_of([2]), BLOCK)
    assert (second["lora_name"], second["medium"]) == ("lora", "EXTERNAL")
    state.gone(chain.keys[1])
    state.gone(chain.keys[0])
    (removed,) = map(msgspec.structs.asdict, state.take())
    assert removed == {"block_hashes": second["block_hashes"] + first["block_hashes"], "medium": "EXTERNAL"}


def test_of_two_layouts_the_one_that_is_stored_is_published() -> None:
    node = Node()
    node.store((0,), now=1.0)
    node.store((0,), now=2.0, root=ROOTS[1])
    node.store((1,), now=3.0, root=ROOTS[1])
    assert node.blocks.other_layout == 2
    node.check()
    node.evict((0,), ROOTS[1])
    node.check()
    # The first layout stores no more: the other one takes its place.
    node.store((1, 1), now=1.0 + ROOT_S, root=ROOTS[1])
    assert node.blocks.restate_due
    node.restate()
    node.check({(1,), (1, 1)})
    node.evict((0,))
    node.check({(1,), (1, 1)})


def test_segments_without_tokens_are_not_published() -> None:
    """Segments without tokens for these blocks are not published."""
    state = Blocks(MODEL, REMAINDER, "CPU")
    chain = prompt([1])
    state.stored(chain.keys[0], 0.0)
    for content in (*contents_of(chain, tokens_of([1]), range(1), MODEL), b"garbage"):
        state.gone(chain.keys[0])
        state.offer(chain.keys[0], content)
        state.stored(chain.keys[0], 0.0)
    assert (state.unknown, state.take()) == (3, [])
    (other,) = contents_of(chain, tokens_of([1]), range(1), "another model")
    state.offer(chain.keys[0], other)
    state.stored(chain.keys[0], 0.0)
    assert (state.unknown, state.take()) == (3, [])


def test_a_content_offered_before_its_segment_leaves() -> None:
    """A prepare offers the contents of all of its segments. The reservation of one may evict a later one."""
    node = Node()
    node.store((0,))
    chain = prompt([0])
    node.blocks.offer(chain.keys[0], contents_of(chain, tokens_of([0]), range(1), MODEL)[0])
    node.evict((0,))
    node.blocks.stored(chain.keys[0], 0.0)
    node.held.add((0,))
    node.tell()
    node.check()
    assert node.blocks.unknown == 0


def test_changes_that_were_missed() -> None:
    node = Node()
    for path in ((0,), (0, 0), (1,)):
        node.store(path)
    chain = prompt([0, 1])
    node.blocks.offer(chain.keys[1], contents_of(chain, tokens_of([0, 1]), range(1, 2), MODEL)[0])
    node.held = {(0,), (0, 1)}
    node.blocks.only({prompt(list(path)).keys[-1] for path in node.held} | {SegmentKey(b"?" * 32)}, 0.0)
    assert node.blocks.take() == []
    node.restate()
    node.check()
    # The content of one that left is known, should it return.
    node.blocks.stored(prompt([1]).keys[0], 0.0)
    node.held.add((1,))
    node.tell()
    node.check()


def test_contents_that_never_become_ready_are_bounded() -> None:
    state = Blocks(MODEL, BLOCK, "CPU", 10_000)
    chains = [prompt([number]) for number in range(100)]
    for number, chain in enumerate(chains):
        state.offer(chain.keys[0], contents_of(chain, tokens_of([number]), range(1), MODEL)[0])
        assert state.kept_bytes <= 10_000
    state.stored(chains[0].keys[0], 0.0)
    state.stored(chains[99].keys[0], 0.0)
    assert (state.unknown, state.published) == (1, 1)
    assert state.content(chains[99].keys[0])
    assert not state.content(chains[0].keys[0])


def test_short_contents_are_charged_with_their_keys() -> None:
    """An engine may send any number of contents of one byte, for segments that it never writes."""
    keys = [SegmentKey(number.to_bytes(32, "big")) for number in range(6000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        state = Blocks(MODEL, BLOCK, "CPU")
        for key in keys:
            state.offer(SegmentKey(bytes(bytearray(key))), bytes(bytearray(b"xyz")))
        assert tracemalloc.get_traced_memory()[0] - before <= state.kept_bytes
    finally:
        tracemalloc.stop()


def test_a_restatement_of_many_segments_begins_with_the_clearing() -> None:
    node = Node()
    paths = [path for path in SEGMENTS if path]
    random.Random(1).shuffle(paths)
    for path in paths:
        node.store(path)
    parts: list[list[Any]] = list(node.blocks.restate(2))
    assert isinstance(parts[0][0], AllBlocksCleared)
    assert sum(isinstance(event, AllBlocksCleared) for part in parts for event in part) == 1
    assert sum(len(part) for part in parts) == 1 + len(SEGMENTS)
