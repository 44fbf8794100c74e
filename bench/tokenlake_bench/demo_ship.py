"""The demo's second part: questions about long documents, answered once by fetching the documents' segments and once by
shipping queries to the node that has them."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table

from tokenlake.attention import AttentionShape
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake_bench import demo_wire as wire
from tokenlake_bench.demo_engine_handle import EngineHandle
from tokenlake_bench.load_meter import settle
from tokenlake_bench.report import ShipResult, format_bytes, format_duration
from tokenlake_testing.cluster import Cluster

DOCUMENTS = 3
DOCUMENT_TOKENS = 2048
QUESTIONS = 2
"""Number of questions that are asked about each document."""
QUESTION_TOKENS = 24
NEW_TOKENS = 4
WINDOW = 32
WRITER, READER = 0, 1
"""Numbers of the engine that stores the documents and of the engine that answers questions; their nodes have the same
numbers."""
SEED = 7


@dataclass
class _Served:
    """Totals over the requests for which the prefix was used in one way: fetched, or attended to at its node by shipped
    queries."""

    ttft_ms: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    formula_bytes: int = 0
    cached_tokens: int = 0
    equal: int = 0


def run_ship_part(
    console: Console, cluster: Cluster, engines: list[EngineHandle], layout: Layout, q_heads: int, vocabulary: int
) -> ShipResult:
    """An engine at one node stores documents; an engine at another node answers questions about them, once by fetching
    and once by attending in place.

    The nodes of `cluster` have query engines and nothing stored. Raises TokenLakeError when an engine ends.
    """
    draw = random.Random(SEED)
    documents = [[draw.randrange(vocabulary) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
    prompts = [
        document + [draw.randrange(vocabulary) for _ in range(QUESTION_TOKENS)]
        for document in documents
        for _ in range(QUESTIONS)
    ]
    engines[WRITER].attach(cluster.nodes[WRITER].socket, WINDOW)
    for document in documents:
        engines[WRITER].run(wire.Run([*document, 0], 1, cold=False))
    engines[WRITER].finish()
    settle(cluster)
    # Queries are shipped before prefixes are fetched: a fetch leaves cached copies at the reader's node, over which
    # later queries would be computed there.
    shipped = _ask(console, cluster, engines[READER], prompts, layout, q_heads, "ship")
    fetched = _ask(console, cluster, engines[READER], prompts, layout, q_heads, "fetch")
    return ShipResult(
        requests=len(prompts),
        cached_tokens=shipped.cached_tokens,
        fetch_bytes=fetched.moved_bytes,
        fetch_formula_bytes=fetched.formula_bytes,
        ship_bytes=shipped.moved_bytes,
        ship_formula_bytes=shipped.formula_bytes,
        fetch_ttft_ms=statistics.median(fetched.ttft_ms),
        ship_ttft_ms=statistics.median(shipped.ttft_ms),
        tokens_equal=fetched.equal == shipped.equal == len(prompts),
    )


def _ask(
    console: Console,
    cluster: Cluster,
    engine: EngineHandle,
    prompts: list[list[int]],
    layout: Layout,
    q_heads: int,
    mode: Literal["fetch", "ship"],
) -> _Served:
    engine.attach(cluster.nodes[READER].socket, WINDOW, mode)
    served = _Served()
    size = DTYPE_BYTES[layout.dtype]
    query_bytes = AttentionShape.of(layout, q_heads).query_bytes(size, size)
    sent = cluster.totals()["tokenlake_sent_bytes_total"]
    for prompt in prompts:
        with console.status(f"{mode}: {len(served.ttft_ms) + 1} of {len(prompts)}"):
            remote = _remote_segments(cluster, layout, prompt)
            ran = engine.run(wire.Run(prompt, NEW_TOKENS))
        cached = ran.shipped_tokens if mode == "ship" else ran.hit_tokens
        served.cached_tokens += cached
        served.ttft_ms.append(ran.ttft_ms)
        served.equal += not ran.error and ran.tokens == ran.cold_tokens
        served.moved_bytes += ran.query_bytes
        served.formula_bytes += ran.queries_sent * query_bytes if mode == "ship" else remote * layout.segment_bytes
    engine.finish()
    settle(cluster)
    if mode == "fetch":
        served.moved_bytes += int(cluster.totals()["tokenlake_sent_bytes_total"] - sent)
    return served


def _remote_segments(cluster: Cluster, layout: Layout, prompt: list[int]) -> int:
    """Number of segments of a prompt that only nodes other than the reader's have."""
    with cluster.connect(READER, layout) as pool:
        keys = pool.prefix(prompt).keys[: (len(prompt) - 1) // layout.segment_tokens]
        with pool.match(keys) as lease:
            return lease.hits - lease.local_hits


def ship_table(result: ShipResult) -> RenderableType:
    """The totals of both ways as a table for a terminal."""
    title = f"long documents, short answers: {result.requests} requests, {result.cached_tokens:,} cached tokens"
    table = Table("", "fetched", "attended in place", title=title, title_justify="left")
    table.add_row("bytes between nodes", format_bytes(result.fetch_bytes), format_bytes(result.ship_bytes))
    table.add_row("by the formula", format_bytes(result.fetch_formula_bytes), format_bytes(result.ship_formula_bytes))
    fetch, ship = (format_duration(each / 1e3) for each in (result.fetch_ttft_ms, result.ship_ttft_ms))
    table.add_row("TTFT, median", fetch, ship)
    table.add_row("tokens equal", *["yes" if result.tokens_equal else "NO"] * 2)
    return table
