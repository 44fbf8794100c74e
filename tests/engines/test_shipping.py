"""Mode `ship`: queries go to the prefixes, and the tokens equal those of the model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from tests.engines.models import FAMILIES, SEGMENT, family, padded, prompt
from tests.robustness.live import PATIENT, wait_told, wait_until
from tokenlake.errors import ConfigurationError
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.engines.transformers import Counts, EngineOptions, TokenLakeEngine, layout_of
from tokenlake_client.engines.transformers.shipped_cache import ShippedCache
from tokenlake_client.queries import View
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

NEW = 12
WRITER, READER = 0, 2
LOGITS = 1e-4


def engine_at(cluster: Cluster, node: int, model: Any, mode: Any = "ship", **options: Any) -> TokenLakeEngine:
    settings: dict[str, Any] = {
        "segment_tokens": SEGMENT,
        "prefill_chunk": 24,
        "query_deadline": 10.0,
        "write_patience": 30.0,
        # On a busy machine a fetch outlasts what the daemon predicts.
        "deadlines": msgspec.structs.replace(PATIENT, fetch_s=2.0),
    }
    settings |= options
    return TokenLakeEngine(model, cluster.nodes[node].socket, EngineOptions(mode=mode, **settings))


def generate(call: Callable[..., Any], rows: list[list[int]], **arguments: Any) -> tuple[list[list[int]], Any]:
    """Greedy tokens, and the logits of every step."""
    ids, mask = padded(rows)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **arguments}
    output = call(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
    return output.sequences.tolist(), torch.stack(output.logits)


def check(engine: TokenLakeEngine, model: Any, rows: list[list[int]], **arguments: Any) -> Counts:
    """Check that tokens and logits equal the model's own, and that the model is left as it was. Returns the counts of
    the call."""
    attention = model.config._attn_implementation
    expected, logits = generate(model.generate, rows, **arguments)
    before = engine.counts
    tokens, got = generate(engine.generate, rows, **arguments)
    assert tokens == expected
    assert float((got - logits).abs().max()) <= LOGITS
    assert model.config._attn_implementation == attention
    assert "forward" not in vars(model)
    after = engine.counts
    counts = Counts(*(getattr(after, name) - getattr(before, name) for name in Counts.__slots__))
    assert counts.tokens_asked == sum(map(len, rows))
    assert counts.tokens_asked == counts.tokens_hit + counts.tokens_shipped + counts.tokens_computed
    assert counts.failures == counts.requests_without_pool == 0, counts
    return counts


def put(cluster: Cluster, model: Any, rows: list[list[int]], node: int = WRITER) -> None:
    """Compute the prompts at a node and wait until the directory nodes know that it owns their segments."""
    with engine_at(cluster, node, model, mode="fetch") as engine:
        for row in rows:
            # `prefill` does not compute the last token: one is added, so that all of the prompt is stored.
            engine.prefill([*row, 2])
        assert engine.flush(30)
        assert not engine.counts.tokens_not_stored
    wait_told(cluster)


def places(cluster: Cluster, node: int, layout: Layout, tokens: list[int]) -> set[str]:
    """The nodes of a view of the prompt that is opened at `node`."""
    with cluster.connect(node, layout) as pool, pool.match(whole(pool, tokens), deadline_s=5.0) as lease:
        assert lease.hits == (len(tokens) - 1) // SEGMENT
        return set(lease.nodes())


def whole(pool: Pool, tokens: list[int]) -> list[Any]:
    return list(pool.prefix(tokens).keys[: (len(tokens) - 1) // SEGMENT])


def shipped(rows: list[list[int]]) -> int:
    """The number of tokens in whole segments before the last token."""
    return sum((len(row) - 1) // SEGMENT * SEGMENT for row in rows)


def test_prefixes_here_on_another_node_and_on_two_others(cluster: Cluster, model: Any) -> None:
    layout = layout_of(model, segment_tokens=SEGMENT)
    writer, other, reader = (node.name for node in cluster.nodes)
    wanted = [{reader}, {writer}, {other}, {writer, other}]
    rows = [prompt(2 * SEGMENT + 1 + seed % SEGMENT, 100 + seed) for seed in range(4 * 8)]
    for node in range(3):
        put(cluster, model, rows[8 * node : 8 * node + 8], node)
    # Of the last rows, `WRITER` computes the first segment, and the other node the second one. Where the reader's node
    # is the directory node of the second segment, it asks the other node for both, which has a copy of the first.
    put(cluster, model, [row[:SEGMENT] for row in rows[24:]])
    put(cluster, model, rows[24:], 1)
    found = {frozenset(places(cluster, READER, layout, row)): row for row in rows}
    assert found.keys() == set(map(frozenset, wanted))
    with engine_at(cluster, READER, model) as engine:
        for nodes in wanted:
            counts = check(engine, model, [found[frozenset(nodes)]])
            assert counts.tokens_shipped == 2 * SEGMENT
            assert bool(counts.bytes_sent) == bool(counts.bytes_received) == (nodes != {reader})
        # One batch of rows of different lengths, on all nodes, and one row that no node knows.
        counts = check(engine, model, [*rows[:8], prompt(SEGMENT, 999)])
        assert counts.tokens_shipped == shipped(rows[:8])
        assert counts.tokens_hit == 0


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gptj", "codegen")])
def test_models_of_several_families(cluster: Cluster, name: str) -> None:
    model = family(name)
    rows = [prompt(5 * SEGMENT + 3, 1), prompt(2 * SEGMENT, 2)]
    put(cluster, model, rows)
    with engine_at(cluster, READER, model) as engine:
        assert check(engine, model, rows).tokens_shipped == shipped(rows)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_unsupported_attention_is_named_and_fetched(
    cluster: Cluster, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = family(name)
    rows = [prompt(5 * SEGMENT + 3, 1)]
    put(cluster, model, rows)
    with engine_at(cluster, READER, model) as engine:
        # On a busy machine a fetch misses its deadline: then the engine computes the prompt, and the next one is a hit.
        wait_until(lambda: check(engine, model, rows).tokens_hit == shipped(rows), "the prefix is fetched")
    assert "prefixes of" in caplog.text


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_prefill_in_chunks_and_a_long_answer(cluster: Cluster, model: Any, chunk: int) -> None:
    """The segments behind the prefix are stored too: the next turn ships queries to them."""
    tokens = prompt(4 * SEGMENT, 20 + chunk)
    put(cluster, model, [tokens])
    turn = [tokens + prompt(2 * SEGMENT + 9, 21 + chunk)]
    with engine_at(cluster, READER, model, prefill_chunk=chunk) as engine:
        assert check(engine, model, turn, max_new_tokens=60).tokens_shipped == 4 * SEGMENT
        assert engine.flush(30)
        answer, _ = generate(engine.generate, turn, max_new_tokens=60)
        known = (len(answer[0]) - 1) // SEGMENT * SEGMENT
        assert check(engine, model, [answer[0] + prompt(5, 3)]).tokens_shipped == known


def test_rows_that_share_a_prefix_and_copies_of_them(cluster: Cluster, model: Any) -> None:
    head = prompt(6 * SEGMENT, 30)
    rows = [head + prompt(3, 31), head + prompt(19, 32), prompt(11, 33), head[:40], prompt(3 * SEGMENT + 5, 34)]
    put(cluster, model, [head, rows[-1]])
    with engine_at(cluster, READER, model) as engine:
        counts = check(engine, model, rows)
        assert counts.tokens_shipped == 6 * SEGMENT * 2 + 2 * SEGMENT + 3 * SEGMENT
        ids, mask = padded(rows)
        settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3}
        settings["temperature"] = 5.0
        torch.manual_seed(5)
        expected = model.generate(ids, attention_mask=mask, **settings).tolist()
        torch.manual_seed(5)
        assert engine.generate(ids, attention_mask=mask, **settings).tolist() == expected
        assert len({tuple(row) for row in expected}) == 3 * len(rows)


@pytest.mark.parametrize("length", [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1])
def test_prompts_that_end_near_a_segments_end(cluster: Cluster, model: Any, length: int) -> None:
    tokens = prompt(2 * SEGMENT + 1, 40)
    put(cluster, model, [tokens])
    with engine_at(cluster, READER, model) as engine:
        assert check(engine, model, [tokens[:length]]).tokens_shipped == (length - 1) // SEGMENT * SEGMENT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(cluster: Cluster, dtype: Any) -> None:
    model = family("llama-gqa", dtype)
    rows = [prompt(8 * SEGMENT + 3, 50)]
    put(cluster, model, rows)
    _, logits = generate(model.generate, rows, max_new_tokens=1)
    with engine_at(cluster, READER, model) as engine:
        _, got = generate(engine.generate, rows, max_new_tokens=1)
        assert engine.counts.tokens_shipped == shipped(rows)
    # Rounding changes tokens of random models, so only the first logits are compared.
    assert float((got - logits).abs().max()) <= 0.05 * float(logits.abs().max())


def test_other_bytes_give_other_tokens(cluster: Cluster, model: Any) -> None:
    """The control: without reading the prefix the tokens would stay the same."""
    rows = [prompt(6 * SEGMENT + 3, 80)]
    expected, _ = generate(model.generate, rows)
    layout = layout_of(model, segment_tokens=SEGMENT)
    with engine_at(cluster, WRITER, model, mode="fetch", salt="other") as other:
        other.prefill(prompt(6 * SEGMENT + 3, 81))
        assert other.flush(30)
    with cluster.connect(WRITER, layout) as pool:
        # The keys of one prompt get the cache of another, with one bit of each number changed.
        with pool.match(pool.prefix(prompt(6 * SEGMENT, 81), salt="other").keys, deadline_s=5.0) as lease:
            wrong = [array.view("u2") ^ 0x0180 for array in lease.fetch()]

        def fill(index: int, slot: Any) -> None:
            slot[:] = wrong[index].view("u1")

        codes = pool.store_all(pool.prefix(rows[0]).keys, fill)
        assert set(codes) == {Code.COMMITTED}
    wait_told(cluster)
    with engine_at(cluster, READER, model) as engine:
        tokens, _ = generate(engine.generate, rows)
        assert engine.counts.tokens_shipped == shipped(rows)
        assert engine.counts.failures == 0
    assert tokens != expected


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("call", ["prefix", "match", "open_view", "init_query", "query"])
def test_a_failing_pool_changes_no_token(
    cluster: Cluster, model: Any, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    rows = [prompt(3 * SEGMENT + 20, 90), prompt(2 * SEGMENT + 3, 91)]
    put(cluster, model, rows)
    expected, _ = generate(model.generate, rows)
    with cluster.connect(READER, layout_of(model, segment_tokens=SEGMENT)) as pool:
        owner = pool if call in ("prefix", "match") else pool.queries
        right, calls = getattr(owner, call), 0

        def broken(*args: Any, **arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(f"{call} is broken")
            return right(*args, **arguments)

        monkeypatch.setattr(owner, call, broken)
        with TokenLakeEngine(model, pool, EngineOptions(mode="ship", prefill_chunk=8)) as engine:
            while calls <= after:
                assert generate(engine.generate, rows)[0] == expected
            counts = engine.counts
            assert counts.failures
            assert counts.tokens_asked == counts.tokens_hit + counts.tokens_shipped + counts.tokens_computed
            assert bool(counts.steps_void) == (call in ("init_query", "query"))


def test_no_room_for_copies_leaves_no_view(cluster: Cluster, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [prompt(3 * SEGMENT + 20, 95)]
    put(cluster, model, rows)
    settings = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 4}
    torch.manual_seed(5)
    expected, _ = generate(model.generate, rows, **settings)
    opened: list[View] = []
    with cluster.connect(READER, layout_of(model, segment_tokens=SEGMENT)) as pool:
        right = pool.queries.open_view

        def noted(*args: Any) -> View:
            opened.append(right(*args))
            return opened[-1]

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("there is no room")

        monkeypatch.setattr(pool.queries, "open_view", noted)
        monkeypatch.setattr(ShippedCache, "batch_repeat_interleave", full)
        with TokenLakeEngine(model, pool, EngineOptions(mode="ship")) as engine:
            torch.manual_seed(5)
            assert generate(engine.generate, rows, **settings)[0] == expected
        assert [view.alive for view in opened] == [False]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of auto, fetch, ship"):
        EngineOptions(mode="teleport")  # type: ignore[arg-type]
