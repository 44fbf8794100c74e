"""A transformers model that takes the known prefix of each prompt from the pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

from tokenlake.errors import LayoutRefused, Refused
from tokenlake.keys import Prefix
from tokenlake.layout import Layout
from tokenlake_client.engines.base import CachePool, QueryPool
from tokenlake_client.engines.connection import Connection
from tokenlake_client.engines.transformers.attention import query_shape
from tokenlake_client.engines.transformers.cache import CacheShape, RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.counters import Counters, Counts
from tokenlake_client.engines.transformers.layout import cache_shape, check_model, layout_of
from tokenlake_client.engines.transformers.prefill import PartialLoad, compute, load
from tokenlake_client.engines.transformers.request import NotServed, Request, check_state, read_request
from tokenlake_client.engines.transformers.rows import Row, place_rows
from tokenlake_client.engines.transformers.shipment import Shipment
from tokenlake_client.engines.transformers.shipping import Shipping, shipped_cache
from tokenlake_client.engines.transformers.slots import LayerPair
from tokenlake_client.engines.transformers.writer import Writer, task_of
from tokenlake_client.weights import digest_of_version

__all__ = ["EngineOptions", "Prefill", "TokenLakeEngine"]

logger = logging.getLogger("tokenlake.transformers")

MAX_EXPECTED_TOKENS = 1024
"""Most room that is set aside for decode; a longer answer enlarges the cache when it gets there."""
MAX_REPORTS = 64
"""Distinct messages that are logged; later ones are counted only."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine uses the pool."""

    credential: str | None = None
    adapter: str | None = None
    """Id of the LoRA adapters that are active; part of every key."""
    salt: str | None = None
    """Part of every key: requests share only with requests of the same salt."""
    mode: Literal["fetch", "ship"] = "fetch"
    """`fetch` copies the known prefix of a prompt into the engine's cache. `ship` leaves it where it is, on this node
    or another: `generate` sends each layer's queries there, by the query engine of its node. Where none runs, or a
    model's attention cannot be served so, the log says why, and the prefix is fetched."""
    segment_tokens: int = 256
    weights_digest: str | None = None
    """From `tokenlake_client.weights`; computed from the model where None."""
    window: int = 32
    """Segments that are fetched at a time."""
    prefill_chunk: int = 2048
    """Most tokens of one forward pass; bounds the memory of a long prompt."""
    write_queue: int = 64
    """Prompts waiting to be stored; each keeps its cache alive. Beyond it nothing is stored."""
    write_patience: float = 1.0
    """Seconds the background writer waits for the pool's write budget."""
    query_deadline: float = 2.0
    """Mode `ship`: seconds that one layer of a forward pass waits for attention over its prefixes, once for every
    4 Mi pairs of a new and a cached token that are begun. After that the pass is void, and repeated with the prefix
    fetched or computed."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The cache of all but the last token of a prompt: `past_key_values` for `model.generate(ids, ...)`."""

    cache: RoomyCache
    tokens_hit: int
    tokens_computed: int
    """The last token is computed by whoever goes on, and counted here."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a call of `generate` is served with."""

    pool: CachePool
    request: Request
    rows: list[Row]
    cache: RoomyCache
    shipment: Shipment | None


class TokenLakeEngine:
    """`prefill` and `generate` of a model, with the pool where it helps.

    Nothing that goes wrong in the pool reaches the caller: it is logged once, counted and recomputed. A
    model that the pool cannot serve is named in the log once, and served by the model alone. Like the model
    itself, one engine is used by one thread at a time.
    """

    def __init__(
        self, model: Any, pool: CachePool | str | Path | None = None, options: EngineOptions | None = None
    ) -> None:
        """`pool`: the daemon's socket, or a pool of this model's layout that the caller closes. With a
        socket, one attempt to connect is made here, later ones at the start of requests."""
        self.model = model
        self.options = options or EngineOptions()
        self.layout: Layout | None = None
        self._counters = Counters()
        self._reported: set[str] = set()
        self._source = pool
        self._writer = Writer(
            self._counters,
            self._pool_failed,
            self._say,
            tasks=self.options.write_queue,
            patience=self.options.write_patience,
        )
        self._connection = Connection(None, self._failed)
        self._shape: CacheShape | None = None
        self._shipping: Shipping | None = None
        self._base_digest = ""
        if pool is not None:
            self._open(self.options.weights_digest)

    @property
    def counts(self) -> Counts:
        """A copy of the counts so far."""
        return self._counters.read()

    def prefill(self, token_ids: Sequence[int]) -> Prefill:
        """The cache of `token_ids` (at least one) without the last; its new segments are stored behind it. It holds
        all of them, also in mode `ship`.

        With no pool, or a model that it cannot serve, the cache is computed. Raises only what the model
        raises, and ValueError for an empty prompt.
        """
        tokens = list(token_ids)
        if not tokens:
            raise ValueError("a prompt has at least one token")
        if self._shape is None:
            self._shape = cache_shape(self.model)
        pool = self._usable_pool()
        storage = allocate(self._shape, 1, len(tokens))
        row = Row(tokens)
        place_rows([row], storage, 0, len(tokens) - 1)
        self._hash(pool, [row])
        self._fill(pool, [row], None)
        self._counters.add(**row.counts())
        layers = [RoomyLayer(keys, values, len(tokens) - 1) for keys, values in storage]
        return Prefill(RoomyCache(layers), row.loaded, len(tokens) - row.loaded)

    def generate(self, input_ids: Any, attention_mask: Any = None, **generate_kwargs: Any) -> Any:
        """What `model.generate` returns for the same arguments.

        Calls that the pool cannot serve (beam search, assisted decoding, a cache or embeddings of the
        caller's, padding that is not on the left) go to the model unchanged.
        """
        batch = self._prepare(input_ids, attention_mask, generate_kwargs)
        if batch is None:
            self._counters.add(requests_without_pool=1)
            if attention_mask is not None:
                generate_kwargs["attention_mask"] = attention_mask
            return self.model.generate(input_ids, **generate_kwargs)
        mask, shipment = batch.request.attention_mask, batch.shipment
        try:
            with nullcontext() if shipment is None else shipment.serving(batch.cache):
                output = self.model.generate(
                    input_ids, attention_mask=mask, past_key_values=batch.cache, **generate_kwargs
                )
        finally:
            for row in batch.rows:
                self._counters.add(**row.counts())
            if shipment is not None:
                shipment.close()
        try:
            sequences = output if not hasattr(output, "sequences") else output.sequences
            self._store_decoded(batch, sequences.tolist())
        except Exception as error:
            self._failed("storing what decode completed", error)
        return output

    def new_weights(self, version: str, pool: CachePool | None = None) -> None:
        """The model's weights were changed in place: share from now on only with engines that started from
        the same weights and say the same `version`.

        An engine that was given a pool rather than a socket needs a `pool` of the new layout (see
        `layout`), and serves without until it has one.
        """
        self._writer.flush()
        self._connection.close()
        if self.layout is None:
            return
        if not isinstance(self._source, (str, Path)):
            self._source = pool
        self._open(digest_of_version(self._base_digest, version), keep_base=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything computed so far is stored; False when `timeout` seconds were not enough."""
        return self._writer.flush(timeout)

    def close(self, timeout: float | None = 10.0) -> None:
        """Store what waits, for at most `timeout` seconds, and close the connection if it was opened here."""
        self._writer.close(timeout)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, weights_digest: str | None, *, keep_base: bool = False) -> None:
        """Find the layout and connect. Leaves the engine without a pool where that fails."""
        source, options = self._source, self.options
        given = None if isinstance(source, (str, Path)) else source
        try:
            check_model(self.model, options.adapter)
            if self._shape is None:
                self._shape = cache_shape(self.model)
            self.layout = layout_of(
                self.model,
                segment_tokens=self._segment_tokens(given),
                adapter=options.adapter,
                weights_digest=weights_digest,
                shape=self._shape,
            )
            if not keep_base:
                self._base_digest = self.layout.weights_digest
            if given is not None and given.layout != self.layout:
                raise LayoutRefused(f"the pool's layout is another than the model's, {self.layout}")
        except Exception as error:
            self._failed(f"serving {type(self.model).__name__} with the pool", error)
            return
        if options.mode == "ship":
            self._shipping = self._begin_shipping(self._shape)
        if isinstance(source, (str, Path)):
            self._connection = Connection(lambda: self._connect(source), self._failed)
        elif given is not None:
            self._connection = Connection(None, self._failed, given)

    def _begin_shipping(self, shape: CacheShape) -> Shipping | None:
        options = self.options
        try:
            queries = query_shape(self.model, shape)
        except Exception as error:
            self._say(f"mode 'ship': prefixes of {type(self.model).__name__} are fetched: {error}")
            return None
        return Shipping(
            self.model,
            (shape, queries),
            self._writer,
            self._counters,
            self._failed,
            self._pool_failed,
            window=options.window,
            chunk=options.prefill_chunk,
            deadline_s=options.query_deadline,
        )

    def _segment_tokens(self, given: CachePool | None) -> int:
        """A given pool's, else what the engine used so far, else the option."""
        known = self.layout if given is None else given.layout
        return self.options.segment_tokens if known is None else known.segment_tokens

    def _connect(self, socket: str | Path) -> CachePool:
        # The client is imported by those who connect, so that the tensor code stands without it.
        from tokenlake_client.pool import Pool

        assert self.layout is not None
        pool: CachePool = Pool.connect(socket, self.layout, self.options.credential)
        return pool

    def _usable_pool(self) -> CachePool | None:
        """The pool, where there is one and the model is in a state whose cache may be shared."""
        try:
            pool = self._connection.get()
            if pool is not None:
                check_state(self.model, self.options.adapter)
            return pool
        except NotServed as reason:
            self._say(f"served without the pool: {reason}")
        except Exception as error:
            self._failed("reaching the pool", error)
        return None

    def _prepare(self, input_ids: Any, attention_mask: Any, arguments: dict[str, Any]) -> _Batch | None:
        """All prompts' caches but for their last tokens, or None: the model serves the call alone."""
        pool, shipment = self._usable_pool(), None
        if pool is None or self._shape is None:
            return None
        try:
            request = read_request(self.model, input_ids, attention_mask, arguments)
            rows = [Row(*row) for row in zip(request.tokens, request.padding, strict=True)]
            self._hash(pool, rows)
            if self._shipping is not None:
                shipment = self._shipping.begin(cast(QueryPool, pool), rows)
            length = request.input_ids.shape[1] - 1
            before = 0 if shipment is None else min(row.padding + row.start for row in rows)
            room = 1 + length - before + min(request.new_tokens, MAX_EXPECTED_TOKENS)
            storage = allocate(self._shape, len(rows), room)
            place_rows(rows, storage, before, length)
            self._fill(pool, rows, shipment)
        except Exception as error:
            if shipment is not None:
                shipment.close()
            if isinstance(error, NotServed):
                self._say(f"served without the pool: {error}")
            else:
                self._failed("prefill", error)
            return None
        if shipment is None:
            cache = RoomyCache([RoomyLayer(keys, values, length) for keys, values in storage])
        else:
            cache = shipped_cache(rows, storage, before, length)
        if request.copies > 1:
            cache.batch_repeat_interleave(request.copies)
        return _Batch(pool, request, rows, cache, shipment)

    def _hash(self, pool: CachePool | None, rows: list[Row]) -> None:
        """Set the rows' key chains, where the pool tells them."""
        started = time.perf_counter()
        try:
            if pool is not None:
                for row in rows:
                    row.chain = self._chain(pool, row.tokens)
        except Exception as error:
            self._pool_failed("reading segments", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)

    def _chain(self, pool: CachePool, tokens: list[int]) -> Prefix:
        return pool.prefix(tokens, adapter=self.options.adapter, salt=self.options.salt)

    def _fill(self, pool: CachePool | None, rows: list[Row], shipment: Shipment | None) -> None:
        """Fill the rows' layers and queue their new segments. Raises what the model raises."""
        for row in rows:
            cache: RoomyCache
            if shipment is not None and row.shared is not None:
                whole = shipped_cache([Row(row.tokens, shared=row.shared)], row.layers, row.start, row.start)
                compute(self.model, row.tokens[:-1], whole, self.options.prefill_chunk, partial(shipment.run, whole))
            else:
                if pool is not None and row.chain is not None:
                    self._load(pool, row, row.chain)
                cache = RoomyCache([RoomyLayer(keys, values, row.loaded) for keys, values in row.layers])
                compute(self.model, row.tokens[:-1], cache, self.options.prefill_chunk)
        for row in rows:
            if pool is not None:
                layers = [(keys[0], values[0]) for keys, values in row.layers]
                self._store(pool, row, row.chain, row.known, len(row.tokens) - 1, layers)

    def _load(self, pool: CachePool, row: Row, chain: Prefix) -> None:
        """Set what the pool had of the row. At least the last token stays to compute."""
        started = time.perf_counter()
        try:
            keys = chain.keys[: (len(row.tokens) - 1) // pool.layout.segment_tokens]
            layers = [(keys_[0], values[0]) for keys_, values in row.layers]
            row.loaded = load(pool, keys, layers, self.options.window) if keys else 0
        except PartialLoad as error:
            row.loaded = error.tokens
            self._pool_failed("reading segments", error.__cause__ or error)
        except Exception as error:
            self._pool_failed("reading segments", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)

    def _store(
        self, pool: CachePool, row: Row, chain: Prefix | None, known: int, tokens: int, layers: list[LayerPair]
    ) -> None:
        """Queue the full segments after the first `known` tokens of a sequence that begins as `row`, and whose first
        `tokens` tokens are in `layers`, but for the `row.start` before them."""
        if chain is None:
            return
        first = known // pool.layout.segment_tokens
        keys = chain.keys[first : tokens // pool.layout.segment_tokens]
        if keys:
            self._writer.submit(task_of(pool, pool.layout, keys, first, layers, row.start))

    def _store_decoded(self, batch: _Batch, sequences: list[list[int]]) -> None:
        """Queue the segments that decode completed: of each sequence, the tokens up to its end that were
        fed to the model, which the last one was not."""
        request, cache = batch.request, batch.cache
        for index, sequence in enumerate(sequences):
            row = batch.rows[index // request.copies]
            if row.chain is None:
                continue
            prompt = len(row.tokens)
            tokens = sequence[row.padding : cache.get_seq_length()]
            end = next((i for i in range(prompt, len(tokens)) if tokens[i] in request.stop_tokens), None)
            if end is not None:
                tokens = tokens[: end + 1]
            chain = row.chain if request.copies == 1 else self._chain(batch.pool, row.tokens)
            chain.extend(tokens[prompt:])
            layers = cache.row(index, row.padding + row.start)
            self._store(batch.pool, row, chain, prompt - 1, len(tokens), layers)

    def _failed(self, what: str, error: BaseException) -> None:
        self._counters.add(failures=1)
        self._say(f"{what} failed, and is done without: {type(error).__name__}: {error}")

    def _pool_failed(self, what: str, error: BaseException) -> None:
        self._failed(what, error)
        # A pool that says no is there, and says so at once; any other failure may have cost a deadline.
        if not isinstance(error, Refused):
            self._connection.failed()

    def _say(self, message: str) -> None:
        if message not in self._reported and len(self._reported) < MAX_REPORTS:
            self._reported.add(message)
            logger.warning("%s", message)
