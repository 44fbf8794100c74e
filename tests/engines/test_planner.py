"""The ways to the cache of a prefix: the planner chooses by the measurements, the tokens are those of the model alone,
and the daemons count them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import SEGMENT, padded, prompt
from tests.engines.test_shipping import READER, check, engine_at, put, shipped
from tests.query.scene import serving
from tests.robustness.live import daemons, wait_until
from tokenlake.identity import NodeId
from tokenlake.planner import Rates
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SAMPLES = 64
"""The number of samples of a full fit; the engine's own samples change it little."""


def measured(engine: TokenLakeEngine, cluster: Cluster, prefill_s: float, byte_s: float, query_s: float) -> Rates:
    """Set the rates to these seconds: per new token, per byte from any node, per query and layer there."""
    rates = engine.rates
    for sample in range(SAMPLES):
        count = 1 + sample % 7
        rates.prefill.add(64 * count, 16 * (sample % 5), prefill_s * 64 * count, 0.0)
        rates.copy.add(count << 14, 1e-6 + 1e-12 * (count << 14), 0.0)
        rates.decode.add(count, 64, 1e-5 * count, 0.0)
        for node in cluster.nodes:
            peer = rates.peer(NodeId(node.name))
            peer.fetch.add(count << 14, byte_s * (count << 14), 0.0)
            peer.queries.add(count, count << 10, 16 * count, query_s, 0.0)
    for node in cluster.nodes:
        rates.peer(NodeId(node.name)).open_s.add(query_s)
    return rates


WAYS: dict[str, tuple[str, tuple[float, float, float] | None, str]] = {
    "fetch": ("fetch", None, "hit"),
    "ship": ("ship", None, "shipped"),
    "auto, nothing is measured": ("auto", None, "hit"),
    "auto, fetching is cheap": ("auto", (10.0, 1e-12, 10.0), "hit"),
    "auto, computing is cheap": ("auto", (1e-6, 1.0, 100.0), "skipped"),
    "auto, queries are cheap": ("auto", (10.0, 1.0, 1e-5), "shipped"),
}
"""The mode, the rates as of `measured`, and what becomes of the stored tokens."""


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_cheapest_way_is_taken_and_counted(cluster: Cluster, model: Any, way: str, count: int) -> None:
    """The daemons count the same tokens as the engine."""
    mode, seconds, taken = WAYS[way]
    seed = 10 * sum(map(ord, way)) + 100 * count
    rows = [prompt(6 * SEGMENT + 5 + number, seed + number) for number in range(count)]
    # The last row is computed by this engine alone.
    stored = rows[: max(1, count - 1)]
    put(cluster, model, stored)
    before = cluster.tokens()
    with engine_at(cluster, READER, model, mode=mode) as engine:
        if seconds is not None:
            measured(engine, cluster, *seconds)
        counts = check(engine, model, rows)
        assert engine.flush(30)
    found = {"hit": counts.tokens_hit, "shipped": counts.tokens_shipped, "skipped": counts.tokens_skipped}
    assert sum(found.values()) == shipped(stored)
    # Only segments of other nodes are slow: local ones may be read.
    assert found[taken] == shipped(stored) if taken != "skipped" else found[taken] > found["shipped"] == 0
    assert not counts.bytes_sent or taken == "shipped"
    supplied = counts.tokens_hit + counts.tokens_shipped
    expected = {"asked": counts.tokens_asked, "supplied": supplied, "missed": counts.tokens_computed}

    def counted() -> dict[str, int]:
        grown = {name: tokens - before.get(name, 0) for name, tokens in cluster.tokens().items()}
        asked = grown.pop("asked")
        supplied = sum(grown.pop(source, 0) for source in ("local", "fetched", "shipped"))
        return {"asked": asked, "supplied": supplied, "missed": sum(grown.values())}

    wait_until(lambda: counted() == expected, f"the daemons count {expected}", 10.0)


def test_an_engine_measures_its_work(cluster: Cluster, model: Any) -> None:
    rows = [prompt(6 * SEGMENT + 1 + number, 5000 + number) for number in range(3)]
    put(cluster, model, rows)
    with engine_at(cluster, READER, model, mode="ship") as engine:
        check(engine, model, rows)
        others = [engine.rates.peer(NodeId(node.name)) for node in cluster.nodes if node is not cluster.nodes[READER]]
        assert any(peer.queries.at is not None and peer.open_s.samples for peer in others)
    with engine_at(cluster, READER, model, mode="fetch") as engine:
        check(engine, model, rows)
        others = [engine.rates.peer(NodeId(node.name)) for node in cluster.nodes if node is not cluster.nodes[READER]]
        assert any(peer.fetch.at is not None for peer in others)
        check(engine, model, rows)
        rates = engine.rates
        assert None not in (rates.copy.at, rates.prefill.at, rates.decode.at)
        assert rates.answer_tokens.samples == 2


def test_a_missing_query_engine_is_not_asked_again(model: Any) -> None:
    with daemons(2, "64MiB") as cluster, engine_at(cluster, 1, model, mode="auto") as engine:
        row = prompt(6 * SEGMENT + 1, 7)
        put(cluster, model, [row])
        rates = measured(engine, cluster, prefill_s=10.0, byte_s=1.0, query_s=1e-5)
        ids, mask = padded([row])
        settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=mask, **settings).tolist()
        for _ in range(2):
            assert engine.generate(ids, attention_mask=mask, **settings).tolist() == expected
        counts = engine.counts
        assert counts.tokens_hit == 2 * 6 * SEGMENT
        assert counts.tokens_shipped == 0
        assert counts.failures == 1, "the second call does not try to ship again"
        assert rates is engine.rates


@pytest.mark.parametrize("mode", ["auto", "fetch"])
@pytest.mark.parametrize("where", ["allocate", "place_rows", "RoomyCache"])
def test_a_batch_that_finds_no_memory_keeps_no_lease(
    model: Any, mode: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    row = prompt(4 * SEGMENT + 3, 8)
    ids, mask = padded([row])
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=mask, **settings).tolist()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("there is no room")

    with TokenLakeEngine(model, pool, EngineOptions(mode=mode, segment_tokens=SEGMENT)) as engine:
        engine.prefill(row)
        assert engine.flush(30)
        for _ in range(8):
            engine.rates.prefill.add(64, 0, 64.0, 0.0)
        monkeypatch.setattr(f"tokenlake_client.engines.transformers.engine.{where}", full)
        assert engine.generate(ids, attention_mask=mask, **settings).tolist() == expected
        assert pool.leases or mode == "fetch", "the planner has matched the prompt"
        assert pool.leased == 0


def test_lost_segments_do_not_make_a_node_fast(model: Any) -> None:
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    row = prompt(4 * SEGMENT + 3, 6)
    with TokenLakeEngine(model, pool, EngineOptions(segment_tokens=SEGMENT)) as engine:
        engine.prefill(row)
        assert engine.flush(30)
        pool.far = "far"
        fetch = engine.rates.peer(NodeId("far")).fetch
        pool.lose_after = 1
        assert engine.prefill(row).tokens_hit == SEGMENT
        assert fetch.at is None
        pool.lose_after = None
        assert engine.prefill(row).tokens_hit == 4 * SEGMENT
        assert fetch.at is not None


@pytest.mark.parametrize("mode", ["auto", "ship"])
def test_rows_with_a_shared_prefix_share_leases(model: Any, mode: str) -> None:
    """A session may lease half of its node's memory: the rows' hits exceed that, but for the prefix that they share."""
    layout = layout_of(model, segment_tokens=SEGMENT)
    head = prompt((1 << 20) // layout.segment_bytes // 3 * SEGMENT, 11)
    rows = [head + prompt(1 + number, 12 + number) for number in range(4)]
    # One region of 1 MiB belongs to the layout that `serving` uses.
    with serving(1, "2MiB") as cluster, engine_at(cluster, 0, model, mode=mode) as engine:
        with engine_at(cluster, 0, model, mode="fetch") as writer:
            writer.prefill([*head, 2])
            assert writer.flush(30)
            assert writer.counts.tokens_stored == len(head)
        # With these rates every hit is predicted to be faster to read than to compute.
        measured(engine, cluster, prefill_s=10.0, byte_s=1.0, query_s=10.0)
        ids, mask = padded(rows)
        engine.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert engine.counts.tokens_hit + engine.counts.tokens_shipped == len(rows) * len(head)
