"""One engine computes a prompt and another one generates its tokens: the second computes one token, and the tokens are
those of one engine, whatever happens to the first."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, pool_of, prompt
from tests.engines.vllm.spoiling import spoil, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

NODES = 2

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The fields that proxies send to an engine for prefill."""
LENGTHS = [2, 16, 100, 255, 256, 257, 258, 300, 512, 769, 1000, 1023, 3000]
SLOW_S = 0.2
LONG_S = 20.0
"""A predicted time of a prefill, and with it the longest wait for its segments, that suffices on a busy machine."""
TRIES = 5
"""Prompts of each length: beside busy programs the in-flight markers of the first engine may arrive so late that the
second one computes a prompt, too, or the second one may look up so late that all is stored."""
WAITS = "tokenlake_in_flight_waits_total"


@dataclass(frozen=True)
class Fleet:
    """Engines of one model that were started at once."""

    prefill: Engine
    slow: Engine
    """For prefill too; it takes long to store a segment."""
    near: Engine
    """On the node of both. Does not verify its reads."""
    far: Engine
    """On the other node. Verifies its reads."""

    @property
    def decoders(self) -> tuple[Engine, Engine]:
        return self.near, self.far


@pytest.fixture(scope="module")
def fleet(start: Callable[..., Engine], plain: Engine, cluster: Cluster) -> Fleet:
    here, there = (pool_of(node) for node in cluster.nodes)
    fleet = Fleet(start(here), start(here), start(here), start({**there, "verify": True}))
    fleet.slow.call("slow_saves", seconds=SLOW_S)
    return fleet


def computed(engine: Engine, tokens: Sequence[int], params: Any) -> Any:
    """Let an engine compute a prompt for another one. Returns the fields for that one."""
    (found,) = engine.timed([tokens], 1, params=params).params
    return found


def counts(engine: Engine) -> dict[str, float]:
    found: dict[str, float] = engine.call("counts")
    return found


def growth(engine: Engine, before: dict[str, float]) -> tuple[float, float, float]:
    """(requests of which the engine computed one token, other ones that another engine had computed, loaded tokens)."""
    after = counts(engine)
    names = ("prefills_taken", "prefills_recomputed", "tokens_loaded")
    taken, recomputed, loaded = (after[name] - before[name] for name in names)
    return taken, recomputed, loaded


@pytest.mark.parametrize("kind", ["near", "far"])
def test_the_second_engine_computes_one_token(kind: str, fleet: Fleet, plain: Engine) -> None:
    decoder: Engine = getattr(fleet, kind)
    for length in LENGTHS:
        outcomes: list[tuple[float, float, float]] = []
        while (1, 0, length - 1) not in outcomes:
            tokens = prompt(length, 1000 * (kind == "far") + length + 10_000 * len(outcomes))
            expected = plain.generate([tokens])
            decoder.call("expect_prefill", token_s=LONG_S / length)
            fields = computed(fleet.prefill, tokens, PREFILL)
            assert fields["do_remote_prefill"]
            assert fields["remote_num_tokens"] == length
            before = counts(decoder)
            # The request is sent as soon as the first answer is there, while the segments are being stored.
            assert decoder.timed([tokens], params=fields).tokens == expected, length
            outcomes.append(growth(decoder, before))
            assert outcomes[-1][:2] in ((1, 0), (0, 1)), (length, outcomes)
            assert len(outcomes) <= TRIES, (length, outcomes)


def test_many_at_once(fleet: Fleet, plain: Engine) -> None:
    many = [prompt(300 + 97 * number, 50 + number) for number in range(12)]
    expected = plain.generate(many)
    fields = fleet.prefill.timed(many, 1, params=PREFILL).params
    for decoder in fleet.decoders:
        decoder.call("expect_prefill", token_s=LONG_S / len(many[0]))
        before = counts(decoder)
        assert decoder.timed(many, params=fields).tokens == expected
        taken, recomputed, loaded = growth(decoder, before)
        # On a busy machine loads are given up, and their prompts are computed.
        assert taken + recomputed == 12
        assert taken > 0
        assert 0 < loaded <= sum(map(len, many)) - 12
        assert recomputed or loaded == sum(map(len, many)) - 12
        assert decoder.call("forget")


def test_the_second_engine_waits_for_the_first(fleet: Fleet, plain: Engine, cluster: Cluster) -> None:
    fleet.slow.call("expect_prefill", token_s=0.01)
    seen: list[tuple[bool, tuple[float, float, float]]] = []
    while (True, (1, 0, 699)) not in seen:
        assert len(seen) < TRIES, seen
        tokens = prompt(700, 500 + len(seen))
        expected = plain.generate([tokens])
        waits, before = cluster.totals()[WAITS], counts(fleet.far)
        fields = computed(fleet.slow, tokens, PREFILL)
        assert fleet.far.timed([tokens], params=fields).tokens == expected
        seen.append((cluster.totals()[WAITS] > waits, growth(fleet.far, before)))


def test_a_frozen_first_engine_costs_a_bounded_wait(fleet: Fleet, plain: Engine) -> None:
    tokens = prompt(700, 71)
    expected = plain.generate([tokens])
    fleet.slow.call("expect_prefill", token_s=0.001)
    before, fields = counts(fleet.far), computed(fleet.slow, tokens, PREFILL)
    assert fields["remote_prefill_s"] < 2.0
    fleet.slow.process.send_signal(signal.SIGSTOP)
    try:
        assert fleet.far.timed([tokens], params=fields).tokens == expected
    finally:
        fleet.slow.process.send_signal(signal.SIGCONT)
    assert growth(fleet.far, before)[:2] == (0, 1)


def test_a_corrupt_tail(fleet: Fleet, plain: Engine, cluster: Cluster) -> None:
    """The control: an engine that does not check what it reads generates other tokens with a corrupt tail."""
    tokens = prompt(700, 80)
    expected = plain.generate([tokens])
    fields = computed(fleet.prefill, tokens, PREFILL)
    assert fleet.prefill.call("flush")
    assert spoil(cluster, fleet.prefill, tokens, 1, tail=True) == 1
    assert fleet.far.timed([tokens], params=fields).tokens == expected
    assert counts(fleet.far)["loads_failed"] > 0
    # The node has found the corrupt bytes by then; another tail is corrupt for the engine that does not check.
    tokens = prompt(700, 81)
    expected = plain.generate([tokens])
    fields = computed(fleet.prefill, tokens, PREFILL)
    assert fleet.prefill.call("flush")
    assert spoil(cluster, fleet.prefill, tokens, 1, tail=True) == 1
    assert fleet.near.timed([tokens], params=fields).tokens != expected
    assert fleet.near.call("forget")
    # No other request looks the tail up.
    for other in (None, {"do_remote_prefill": True}):
        assert fleet.near.timed([tokens], params=other).tokens == expected
        assert fleet.near.call("forget")


def test_an_aborted_request_moves(fleet: Fleet, plain: Engine) -> None:
    """The second engine computes at most one segment, also where the first has not stored the last one yet."""
    for first in (fleet.prefill, fleet.slow):
        # The abort comes in the step that completes a segment, and in others.
        for length, tokens_before in ((500, 13), (500, 30), (505, 7)):
            tokens = prompt(length, 1000 + length + tokens_before)
            expected = plain.generate([tokens], tokens_before + 8)[0]
            generated = first.call("aborted", prompt=tokens, tokens=tokens_before)
            assert generated == expected[:tokens_before]
            moved = [*tokens, *generated]
            answer = fleet.far.timed([moved], params={"do_remote_prefill": True})
            assert answer.tokens == [expected[tokens_before:]]
            assert len(moved) - answer.cached <= 256


def test_lost_segments_are_recomputed(fleet: Fleet, plain: Engine, cluster: Cluster) -> None:
    many = [prompt(900 + number, 90 + number) for number in range(3)]
    expected = plain.generate(many)
    fields = fleet.prefill.timed(many, 1, params=PREFILL).params
    assert fleet.prefill.call("flush")
    cluster.nodes[0].kill()
    before = counts(fleet.far)
    assert fleet.far.timed(many, params=fields).tokens == expected
    taken, recomputed, _ = growth(fleet.far, before)
    assert (taken, recomputed) == (0, 3)
    # Without its daemon an engine offers nothing.
    assert computed(fleet.prefill, prompt(300, 95), PREFILL) is None
    cluster.nodes[0].start()
    cluster.wait_ready()
    until = time.monotonic() + TIMEOUT_S
    while computed(fleet.prefill, prompt(300, 96), PREFILL) is None:
        assert time.monotonic() < until


def test_the_first_engine_is_killed_before_it_has_stored(fleet: Fleet, plain: Engine) -> None:
    tokens = prompt(3000, 99)
    expected = plain.generate([tokens])
    before, fields = counts(fleet.far), computed(fleet.slow, tokens, PREFILL)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(fleet.far.timed, [tokens], params=fields)
        fleet.slow.process.kill()
        assert waiting.result().tokens == expected
    assert growth(fleet.far, before)[:2] == (0, 1)


def test_no_error_reached_vllm(fleet: Fleet) -> None:
    for engine in (fleet.prefill, *fleet.decoders):
        assert tracebacks(engine) == []
