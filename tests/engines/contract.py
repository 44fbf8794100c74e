"""What every door keeps, whatever the engine behind it. A door is the integration of one engine, or of one kind of
cache of an engine.

A module of tests gives its fixture `door`, and inherits the cases::

    class TestContract(Contract):
        pass

The cases of a module run in order and share the engines of its door, because engines take long to start: those that end
with other weights come last.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.gate import ANSWER, LOAD, Gate
from tests.robustness.live import wait_until
from tests.server.scene import BLUE, OF_THIS_USER, tenants
from tokenlake.hints import Hints
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client import Deadlines, MatchOptions, Pool
from tokenlake_testing.cluster import Cluster, Node

TIMEOUT_S = 120.0
DEADLINES = Deadlines(connect_s=20.0, dial_s=20.0, call_s=20.0, match_s=20.0, fetch_s=20.0, store_s=20.0, grace_s=20.0)
"""Deadlines that hold on a busy machine."""
LEASE_S = 3.0
"""The setting `lease_s` of the engines of doors that have it."""
REGIONS = 64
"""A bound on the numbers of a node's regions."""
BATCH, BATCH_BYTES = 256, 4 << 20
"""The memory of a node is filled by so many segments or bytes at a time."""
PATIENCE_S = 0.5
"""Seconds without progress after which the memory of a node counts as full."""
KEPT = Hints(priority=1)
"""Hints of segments that replace those of engines."""
FOREIGN = BLUE
"""The credential of the engine of another tenant."""


class Who(enum.Enum):
    """The engines of a door, of one model."""

    PLAIN = enum.auto()
    """Without the pool."""
    FIRST = enum.auto()
    """On node 0. It verifies its reads."""
    SECOND = enum.auto()
    """Another process, on node 1. It does not verify its reads."""
    FOREIGN = enum.auto()
    """On node 0, of another tenant."""


class Answer(NamedTuple):
    """What an engine answers."""

    tokens: list[int]
    cached: int
    """The number of tokens of the prompt that the pool supplied. The last one may be among them; it is computed
    anew."""


class Door(ABC):
    """The engines of one door, each with a cache of its own that is emptied before each call of `ask`."""

    cluster: Cluster
    """Two nodes, as `nodes` starts them."""
    gate: Gate
    """The gate of `SECOND`."""
    segment: int
    """The number of tokens of a segment."""
    unit: int
    """A multiple of `segment`: prompts have some units and a rest."""
    segment_bytes: int
    without: Mapping[str, str] = {}
    """By the name of a case that this door cannot run: the reason."""

    @abstractmethod
    def prompt(self, length: int, seed: int) -> list[int]:
        """Token ids; two seeds share no prefix."""

    @abstractmethod
    def ask(self, who: Who, tokens: Sequence[int]) -> Answer:
        """The greedy answer to a prompt. The engine stores the new segments in the background."""

    @abstractmethod
    def settle(self, who: Who) -> None:
        """Wait until an engine stores nothing any more."""

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Give `SECOND` a request, which goes on by itself at most until its lookup is answered. With `gate` closed at
        `ANSWER`."""

    @abstractmethod
    def abort(self) -> None:
        """Abort that request."""

    def change_weights(self, who: Who) -> None:
        """Replace the weights of an engine in place, each time by the same other ones."""
        raise NotImplementedError

    def loadable(self, length: int) -> int:
        """The least number of tokens of a stored prompt that are loaded; the last token is always computed."""
        return (length - 1) // self.segment * self.segment

    @abstractmethod
    def tracebacks(self) -> list[str]:
        """The lines of the engines' logs that begin a traceback."""


@contextlib.contextmanager
def nodes(directory: Path) -> Iterator[Cluster]:
    """Two nodes with two tenants: engines without a credential are of the first one."""
    config = tenants(directory, red=OF_THIS_USER)
    patient = {"match_deadline_ms": "20000", "suspect_ms": "20000"}
    with Cluster(2, "32MiB", "4MiB", config=config, **patient) as cluster:
        yield cluster


def spoil(node: Node, segment_bytes: int) -> None:
    """Overwrite every segment of this size in the memory of a node with zeros."""
    with _beside(node, segment_bytes) as pool:
        for number in range(REGIONS):
            with contextlib.suppress(Exception):
                slots = pool.link.regions.get(number, write=True).slots
                if slots.shape[1] == segment_bytes:
                    slots[:] = 0


@contextlib.contextmanager
def full(node: Node, segment_bytes: int) -> Iterator[None]:
    """All memory of a node is leased, by several sessions: one may lease a share of it."""
    with contextlib.ExitStack() as stack:
        count = max(1, min(BATCH, BATCH_BYTES // segment_bytes))
        for number in range(3):
            pool = stack.enter_context(_beside(node, segment_bytes))
            for batch in itertools.count():
                names = [(number, (count * batch + at).to_bytes(32, "big")) for at in range(count)]
                keys = pool.opaque_keys(names)
                pool.store_all(keys, lambda index, slot: slot.fill(1), patience=PATIENCE_S, hints=KEPT)
                options = MatchOptions(independent=True, counted_keys=0)
                if not stack.enter_context(pool.match(keys, options, deadline_s=TIMEOUT_S)).hits:
                    break
        yield


def leases(cluster: Cluster) -> float:
    """The number of leases that the daemons count."""
    return sum(
        value
        for node in cluster.nodes
        for name, value in node.metrics().items()
        if name.startswith("tokenlake_map_entries") and '"leases"' in name
    )


def _beside(node: Node, segment_bytes: int) -> Pool:
    """A pool of the engines' tenant whose segments have the size of theirs."""
    layout = OpaqueLayout(
        model_id="beside",
        weights_digest="w",
        engine="test",
        cache="c",
        shards=1,
        shard_bytes=segment_bytes,
        segment_tokens=1,
    )
    return Pool.connect(node.socket, layout, deadlines=DEADLINES)


class Contract:
    """The cases."""

    @pytest.fixture(autouse=True)
    def _only_what_the_door_can(self, door: Door, request: pytest.FixtureRequest) -> None:
        reason = door.without.get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)

    def test_what_one_engine_stores_another_one_finds(self, door: Door) -> None:
        """A prompt with a rest, and one of whole segments. The tokens are those without the pool: cold, warm, and in
        another process on another node."""
        for length, seed in ((3 * door.unit + door.unit // 2, 1), (4 * door.unit, 2)):
            tokens = door.prompt(length, seed)
            expected = door.ask(Who.PLAIN, tokens).tokens
            assert door.ask(Who.FIRST, tokens) == (expected, 0)
            door.settle(Who.FIRST)
            for who in (Who.FIRST, Who.SECOND):
                answer = door.ask(who, tokens)
                assert answer.tokens == expected
                assert door.loadable(length) <= answer.cached <= length

    def test_prompts_that_fork(self, door: Door) -> None:
        tokens = door.prompt(3 * door.unit + door.unit // 2, 1)
        forked = tokens[: 2 * door.unit] + door.prompt(door.unit, 3)
        answer = door.ask(Who.SECOND, forked)
        assert answer.tokens == door.ask(Who.PLAIN, forked).tokens
        assert answer.cached == 2 * door.unit

    def test_another_tenant_finds_nothing(self, door: Door) -> None:
        tokens = door.prompt(3 * door.unit + door.unit // 2, 1)
        assert door.ask(Who.FOREIGN, tokens) == (door.ask(Who.PLAIN, tokens).tokens, 0)
        door.settle(Who.FOREIGN)

    def test_a_changed_cache_changes_the_tokens(self, door: Door) -> None:
        """The control: an engine that does not verify its reads computes with wrong bytes; one that does computes the
        tokens anew."""
        for who, node, seed in ((Who.SECOND, 1, 10), (Who.FIRST, 0, 11)):
            tokens = door.prompt(3 * door.unit + 4, seed)
            right = door.ask(who, tokens)
            assert right == (door.ask(Who.PLAIN, tokens).tokens, 0)
            door.settle(who)
            spoil(door.cluster.nodes[node], door.segment_bytes)
            answer = door.ask(who, tokens)
            assert (answer.tokens == right.tokens) is (who is Who.FIRST)
            assert (answer.cached > 0) is (who is Who.SECOND)

    def test_the_daemon_dies_during_a_load(self, door: Door) -> None:
        """The segments are on the other node, so that the load needs the daemon."""
        tokens = door.prompt(3 * door.unit + door.unit // 2, 20)
        expected = door.ask(Who.FIRST, tokens).tokens
        assert expected == door.ask(Who.PLAIN, tokens).tokens
        door.settle(Who.FIRST)
        answers: list[Answer] = []
        door.gate.close(LOAD)
        thread = threading.Thread(target=lambda: answers.append(door.ask(Who.SECOND, tokens)))
        thread.start()
        try:
            door.gate.await_arrival(LOAD)
            door.cluster.nodes[1].kill()
        finally:
            door.gate.open()
            thread.join(TIMEOUT_S)
        assert [answer.tokens for answer in answers] == [expected]
        door.cluster.nodes[1].start()
        door.cluster.wait_ready()
        self._until_hit(door, Who.SECOND, tokens, expected)

    def test_a_full_memory_changes_no_token(self, door: Door) -> None:
        tokens = door.prompt(3 * door.unit + door.unit // 2, 30)
        expected = door.ask(Who.PLAIN, tokens).tokens
        wait_until(lambda: not leases(door.cluster), "no lease is left of earlier requests", TIMEOUT_S)
        with full(door.cluster.nodes[1], door.segment_bytes):
            for _ in range(2):
                assert door.ask(Who.SECOND, tokens) == (expected, 0)
                door.settle(Who.SECOND)
        self._until_hit(door, Who.SECOND, tokens, expected)

    def test_an_abort_between_lookup_and_load_drops_the_lease(self, door: Door) -> None:
        tokens = door.prompt(3 * door.unit + door.unit // 2, 1)
        expected = door.ask(Who.PLAIN, tokens).tokens
        self._until_hit(door, Who.SECOND, tokens, expected)
        wait_until(lambda: not leases(door.cluster), "no lease is left of earlier requests", TIMEOUT_S)
        door.gate.close(ANSWER)
        try:
            door.begin(tokens)
            wait_until(lambda: leases(door.cluster) > 0, "the lookup is answered", TIMEOUT_S)
            door.abort()
        finally:
            door.gate.open()
        wait_until(lambda: not leases(door.cluster), "the lease is dropped", TIMEOUT_S)
        self._until_hit(door, Who.SECOND, tokens, expected)

    def test_weights_that_change_in_place(self, door: Door) -> None:
        """Nothing that was computed with the old weights is loaded; another engine keeps its segments."""
        tokens = door.prompt(3 * door.unit + door.unit // 2, 40)
        old = door.ask(Who.FIRST, tokens).tokens
        door.settle(Who.FIRST)
        self._until_hit(door, Who.FIRST, tokens, old)
        door.change_weights(Who.PLAIN)
        new = door.ask(Who.PLAIN, tokens).tokens
        assert new != old
        door.change_weights(Who.FIRST)
        assert door.ask(Who.FIRST, tokens) == (new, 0)
        self._until_hit(door, Who.FIRST, tokens, new)
        self._until_hit(door, Who.SECOND, tokens, old)

    def test_no_error_reached_an_engine(self, door: Door) -> None:
        assert door.tracebacks() == []

    def _until_hit(self, door: Door, who: Who, tokens: Sequence[int], expected: list[int]) -> None:
        """Ask until the pool supplies the prompt, each time with the expected answer: the pool is used again a second
        after an error, and beside busy programs an answer may be late."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            door.settle(who)
            answer = door.ask(who, tokens)
            assert answer.tokens == expected
            if answer.cached >= door.loadable(len(tokens)):
                return
            assert time.monotonic() < until, answer
            time.sleep(0.05)
