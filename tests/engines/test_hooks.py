"""Each method of the engine goes on when any call of the pool raises any error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import SEGMENT, prompt
from tests.robustness.live import daemons
from tokenlake.errors import Unreachable
from tokenlake.hints import Hints, Outlook
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.engines.common import connection
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
from tokenlake_testing.cluster import Cluster

CALLS = ("prefix", "match", "nodes", "fetch", "second fetch", "release", "store", "commit", "mark_in_flight", "hint")
SETTINGS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
GOES_ON = Hints(Outlook.GOES_ON)


KNOWN = prompt(4 * SEGMENT + 3, 1)
LONGER = KNOWN + prompt(3 * SEGMENT, 2)
IDS = torch.tensor([LONGER])
MASK = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """The tokens that the model generates without an engine."""
    tokens: list[list[int]] = model.generate(IDS, attention_mask=MASK, **SETTINGS).tolist()
    return tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _use_the_pool_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine uses a pool that has failed again at once, so that each call of the pool is reached."""
    monkeypatch.setattr(connection, "RETRY_S", 0.0)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


@pytest.mark.parametrize("mode", ["fetch", "auto"])
@pytest.mark.parametrize("error", [Unreachable, RuntimeError])
@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_the_pool_reaches_the_caller(
    model: Any,
    expected: list[list[int]],
    call: str,
    error: type[Exception],
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    options = EngineOptions(mode=mode, segment_tokens=SEGMENT, window=2)
    with TokenLakeEngine(model, pool, options) as engine, caplog.at_level(logging.WARNING, "tokenlake"):
        engine.prefill(KNOWN)
        assert engine.flush(30)
        caplog.clear()
        pool.far = "far"
        # A prefill that takes long, so that in-flight markers are set, and reads pay.
        for _ in range(64):
            engine.rates.prefill.add(64, 0, 0.2, 0.0)
        pool.refuse = Code.WRITE_BUDGET
        pool.error, pool.broken = error, {call}
        for _ in range(2):
            assert engine.generate(IDS, attention_mask=MASK, **SETTINGS, hints=GOES_ON).tolist() == expected
            engine.prefill(LONGER, hints=GOES_ON)
            engine.hint(LONGER, GOES_ON)
            assert engine.flush(30)
        lines = said(caplog, f"{call} is broken")
        assert lines
        assert len(lines) == len(set(lines)), "each line once"
        pool.broken = set()
        pool.refuse = None
        assert engine.generate(IDS, attention_mask=MASK, **SETTINGS).tolist() == expected
        if call != "release":
            assert pool.leased == 0


@pytest.mark.live
@pytest.mark.parametrize("error", [Unreachable, RuntimeError])
@pytest.mark.parametrize("end", ["close", "new_weights"])
def test_the_end_of_a_connection_does_not_raise(
    model: Any, cluster: Cluster, end: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TokenLakeEngine(model, cluster.nodes[0].socket, EngineOptions(segment_tokens=SEGMENT))
    close = Pool.close

    def broken(pool: Pool) -> None:
        close(pool)
        raise error("close is broken")

    monkeypatch.setattr(Pool, "close", broken)
    if end == "close":
        engine.close()
    else:
        engine.new_weights("1")
        engine.close()
    assert engine.counts.failures
    engine.close()


def test_a_full_queue_of_stores_does_not_raise(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The in-flight markers of segments that are not stored are removed, which may fail."""
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    pool.broken = {"mark_in_flight"}
    with TokenLakeEngine(model, pool, EngineOptions(segment_tokens=SEGMENT)) as engine:
        monkeypatch.setattr("tokenlake_client.engines.common.background.BackgroundQueue.submit", lambda *_: False)
        assert engine.prefill(prompt(4 * SEGMENT + 3, 4)).tokens_computed == 4 * SEGMENT + 3
        assert engine.counts.failures == 1
