"""The caches of prompts: known prefixes from the pool, the rest from the model, and what is new to the writer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.keys import Prefix
from tokenlake_client.engines.base import CachePool
from tokenlake_client.engines.transformers.cache import RoomyCache, RoomyLayer
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.measured import Measured
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.prefill import PartialLoad, compute, load
from tokenlake_client.engines.transformers.request import Request, ending
from tokenlake_client.engines.transformers.rows import Row
from tokenlake_client.engines.transformers.shipment import Shipment
from tokenlake_client.engines.transformers.shipping import shipped_cache
from tokenlake_client.engines.transformers.slots import LayerPair
from tokenlake_client.engines.transformers.writer import Writer, task_of

__all__ = ["Batch", "Filler"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a call of `generate` is served with."""

    pool: CachePool
    request: Request
    rows: list[Row]
    cache: RoomyCache
    shipment: Shipment | None


class Filler:
    """Fills rows of one model. Errors of the pool are reported and done without."""

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        writer: Writer,
        counters: Counters,
        measured: Measured,
        pool_failed: Callable[[str, BaseException], None],
    ) -> None:
        self._model = model
        self._options = options
        self._writer = writer
        self._counters = counters
        self._measured = measured
        self._pool_failed = pool_failed

    def hash(self, pool: CachePool, rows: list[Row]) -> None:
        """Set the rows' key chains, where the pool tells them."""
        started = time.perf_counter()
        try:
            for row in rows:
                row.chain = self._chain(pool, row.tokens)
        except Exception as error:
            self._pool_failed("reading segments", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)

    def fill(self, pool: CachePool | None, rows: list[Row], shipment: Shipment | None = None) -> None:
        """Fill the rows' layers with all but their last tokens and queue the new segments. Raises what the model
        raises.

        What a row computes is queued before the next row is looked up, which may begin with the same segments and waits
        for them as other engines do: nobody waits for what is not under way."""
        chunk = self._options.prefill_chunk
        for row in rows:
            if shipment is not None and row.shared is not None:
                after = shipped_cache([Row(row.tokens, shared=row.shared)], row.layers, row.start, row.start)
                compute(self._model, row.tokens[:-1], after, chunk, self._measured, partial(shipment.run, after))
            else:
                if pool is not None and row.chain is not None:
                    self._load(pool, row)
                cache = RoomyCache([RoomyLayer(keys, values, row.loaded) for keys, values in row.layers])
                compute(self._model, row.tokens[:-1], cache, chunk, self._measured)
            if pool is not None and row.chain is not None:
                layers = [(keys[0], values[0]) for keys, values in row.layers]
                self._store(pool, row, row.chain, row.known, len(row.tokens) - 1, layers)

    def store_decoded(self, batch: Batch, sequences: list[list[int]]) -> None:
        """Queue the segments that decode completed: of each sequence, the tokens up to its end that were
        fed to the model, which the last one was not. How it ended goes with them, and to the prompt's segments in one
        message: of several sequences the first one's end."""
        request, cache = batch.request, batch.cache
        for index, sequence in enumerate(sequences):
            row = batch.rows[index // request.copies]
            if row.chain is None:
                continue
            prompt = len(row.tokens)
            answer, reason = ending(request, sequence[row.padding + prompt :])
            fed = (row.tokens + answer)[: cache.get_seq_length() - row.padding]
            chain = row.chain if request.copies == 1 else self._chain(batch.pool, row.tokens)
            chain.extend(fed[prompt:])
            layers = cache.row(index, row.padding + row.start)
            ended = replace(row, hints=_ended(row.hints, reason, len(answer)))
            tell = index % request.copies == 0
            self._store(batch.pool, ended, chain, prompt - 1, len(fed), layers, tell=tell)

    def _chain(self, pool: CachePool, tokens: list[int]) -> Prefix:
        return pool.prefix(tokens, adapter=self._options.adapter, salt=self._options.salt)

    def _load(self, pool: CachePool, row: Row) -> None:
        """Set what the pool had of the row."""
        started = time.perf_counter()
        try:
            keys = row.awaited(pool.layout.segment_tokens)
            layers = [(keys_[0], values[0]) for keys_, values in row.layers]
            row.loaded = load(
                pool, keys, layers, self._options.window, self._measured, row.asked, row.found, row.take_lease()
            )
        except PartialLoad as error:
            row.loaded = error.tokens
            self._pool_failed("reading segments", error.__cause__ or error)
        except Exception as error:
            self._pool_failed("reading segments", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)

    def _store(
        self,
        pool: CachePool,
        row: Row,
        chain: Prefix,
        known: int,
        tokens: int,
        layers: list[LayerPair],
        *,
        tell: bool = False,
    ) -> None:
        """Queue the full segments after the first `known` tokens of a sequence that begins as `row`, and whose first
        `tokens` tokens are in `layers`, but for the `row.start` before them. `tell`: the row's hints goes to the
        segments before these as well."""
        first = known // pool.layout.segment_tokens
        keys = chain.keys[first : tokens // pool.layout.segment_tokens]
        told = chain.keys[:first] if tell else ()
        if keys or told:
            # What is only told about keeps no cache alive.
            kept = layers if keys else []
            self._writer.submit(task_of(pool, pool.layout, keys, first, kept, row.start, row.asked, told))


def _ended(hints: Hints | None, reason: str, output_tokens: int) -> Hints:
    """What is known of a request at its end. What its caller said of that counts."""
    said = hints or NO_HINTS
    return said.ended(said.stop_reason or reason, output_tokens if said.output_tokens < 0 else -1)
