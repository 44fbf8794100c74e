"""A transformers model that takes the known prefix of each prompt from the pool."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from tokenlake.attention import AttentionShape
from tokenlake.errors import LayoutRefused, Refused
from tokenlake.hints import Hints
from tokenlake.layout import Layout
from tokenlake.planner import Rates
from tokenlake_client.engines.base import Asked, CachePool, QueryPool
from tokenlake_client.engines.connection import Connection
from tokenlake_client.engines.transformers.attention import query_shape
from tokenlake_client.engines.transformers.cache import CacheShape, RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.counters import Counters, Counts
from tokenlake_client.engines.transformers.filling import Batch, Filler
from tokenlake_client.engines.transformers.layout import cache_shape, check_model, layout_of
from tokenlake_client.engines.transformers.measured import Measured
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.planning import Planning
from tokenlake_client.engines.transformers.request import NotServed, check_state, read_request
from tokenlake_client.engines.transformers.rows import Row, place_rows
from tokenlake_client.engines.transformers.shipping import Shipping, shipped_cache
from tokenlake_client.engines.transformers.writer import Writer, task_of
from tokenlake_client.weights import digest_of_version

__all__ = ["Prefill", "TokenLakeEngine"]

logger = logging.getLogger("tokenlake.transformers")

MAX_EXPECTED_TOKENS = 1024
"""Most room that is set aside for decode; a longer answer enlarges the cache when it gets there."""
MAX_REPORTS = 64
"""Distinct messages that are logged; later ones are counted only."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The cache of all but the last token of a prompt: `past_key_values` for `model.generate(ids, ...)`."""

    cache: RoomyCache
    tokens_hit: int
    tokens_computed: int
    """The last token is computed by whoever goes on, and counted here."""


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
        self.rates = Rates()
        """What this engine measures as it serves: for its own plans, and for a scheduler's."""
        self._measured = Measured(self.rates)
        self._filler = Filler(model, self.options, self._writer, self._counters, self._measured, self._pool_failed)
        self._connection = Connection(None, self._failed)
        self._shape: CacheShape | None = None
        self._placed: tuple[Any, Any] | None = None
        """Where and in which dtype the model was when its shape was read."""
        self._shipping: Shipping | None = None
        self._planning: Planning | None = None
        self._base_digest = ""
        self._name = secrets.token_hex(4)
        self._requests = itertools.count(1)
        if pool is not None:
            self._open(self.options.weights_digest)

    @property
    def counts(self) -> Counts:
        """A copy of the counts so far."""
        return self._counters.read()

    def prefill(self, token_ids: Sequence[int], *, request: str | None = None, hints: Hints | None = None) -> Prefill:
        """The cache of `token_ids` (at least one) without the last; its new segments are stored behind it. It holds
        all of them, also in mode `ship`. `request`: what the logs of all nodes and `tokenlake explain` are to call it
        by. `hints`: what is known of the request (`tokenlake.hints`).

        With no pool, or a model that it cannot serve, the cache is computed. Raises only what the model
        raises, and ValueError for an empty prompt.
        """
        tokens = list(token_ids)
        if not tokens:
            raise ValueError("a prompt has at least one token")
        if self._shape is None:
            self._shape, self._placed = cache_shape(self.model), _placement(self.model)
        pool = self._usable_pool()
        shape = self._shape if self._placed == _placement(self.model) else cache_shape(self.model)
        storage = allocate(shape, 1, len(tokens))
        row = Row(tokens, name=self._named(request), hints=hints)
        place_rows([row], storage, 0, len(tokens) - 1)
        if pool is not None:
            self._filler.hash(pool, [row])
        self._filler.fill(pool, [row])
        self._counters.add(**row.counts())
        layers = [RoomyLayer(keys, values, len(tokens) - 1) for keys, values in storage]
        return Prefill(RoomyCache(layers), row.loaded, len(tokens) - row.loaded)

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        request: str | None = None,
        hints: Hints | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """What `model.generate` returns for the same arguments. `request` and `hints` as of `prefill`, of all rows;
        with several, their names end in `/0`, `/1` and so on.

        Calls that the pool cannot serve (beam search, assisted decoding, a cache or embeddings of the
        caller's, padding that is not on the left) go to the model unchanged.
        """
        named = Asked(self._named(request), hints)
        batch = self._prepare(input_ids, attention_mask, generate_kwargs, named)
        if batch is None:
            self._counters.add(requests_without_pool=1)
            if attention_mask is not None:
                generate_kwargs["attention_mask"] = attention_mask
            return self.model.generate(input_ids, **generate_kwargs)
        mask, shipment = batch.request.attention_mask, batch.shipment
        began = time.perf_counter()
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
            steps = sequences.shape[1] - mask.shape[1]
            self._measured.answered(steps)
            if shipment is None:
                self._measured.decode(len(sequences), mask.shape[1] + steps // 2, steps, time.perf_counter() - began)
            self._filler.store_decoded(batch, sequences.tolist())
        except Exception as error:
            self._failed("storing what decode completed", error)
        return output

    def hint(self, token_ids: Sequence[int], hints: Hints) -> None:
        """A word that came late about a conversation, all of whose tokens these are: that it goes on, or is over. It
        follows what was computed so far to the pool; without one it is lost. Raises nothing."""
        try:
            pool, layout = self._connection.get(), self.layout
            if pool is not None and layout is not None:
                chain = pool.prefix(list(token_ids), adapter=self.options.adapter, salt=self.options.salt)
                self._writer.submit(task_of(pool, layout, (), 0, (), asked=Asked(hints=hints), told=chain.keys))
        except Exception as error:
            self._pool_failed("passing on hints", error)

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
            self._shape, self._placed = cache_shape(self.model), _placement(self.model)
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
        if options.mode != "fetch":
            self._begin_shipping(self._shape, self.layout)
        if isinstance(source, (str, Path)):
            self._connection = Connection(lambda: self._connect(source), self._failed)
        elif given is not None:
            self._connection = Connection(None, self._failed, given)

    def _begin_shipping(self, shape: CacheShape, layout: Layout) -> None:
        attention = None
        try:
            queries = query_shape(self.model, shape)
            attention = AttentionShape.of(layout, queries.heads, queries.scale)
            self._shipping = Shipping(
                self.model,
                (shape, queries),
                self.options,
                self._writer,
                self._counters,
                self._measured,
                self._failed,
                self._pool_failed,
            )
        except Exception as error:
            self._say(f"mode '{self.options.mode}': prefixes of {type(self.model).__name__} are fetched: {error}")
        if self.options.mode == "auto":
            self._planning = Planning(layout, attention, self.rates, self._counters, self._pool_failed)

    def _segment_tokens(self, given: CachePool | None) -> int:
        """A given pool's, else what the engine used so far, else the option."""
        known = self.layout if given is None else given.layout
        return self.options.segment_tokens if known is None else known.segment_tokens

    def _connect(self, socket: str | Path) -> CachePool:
        # The client is imported by those who connect, so that the tensor code stands without it.
        from tokenlake_client.pool import Pool

        assert self.layout is not None
        options = self.options
        pool: CachePool = Pool.connect(
            socket, self.layout, options.credential, daemon_uid=options.daemon_uid, deadlines=options.deadlines
        )
        return pool

    def _usable_pool(self) -> CachePool | None:
        """The pool, where there is one and the model is in a state whose cache may be shared."""
        try:
            pool = self._connection.get()
            if pool is not None:
                check_state(self.model, self.options.adapter)
                if self._placed != _placement(self.model):
                    raise NotServed(f"the model was on {self._placed}, and is on {_placement(self.model)}")
            return pool
        except NotServed as reason:
            self._say(f"served without the pool: {reason}")
        except Exception as error:
            self._failed("reaching the pool", error)
        return None

    def _named(self, request: str | None) -> str:
        return f"{self._name}-{next(self._requests)}" if request is None else request

    def _prepare(self, input_ids: Any, attention_mask: Any, arguments: dict[str, Any], asked: Asked) -> Batch | None:
        """All prompts' caches but for their last tokens, or None: the model serves the call alone."""
        pool, shipment = self._usable_pool(), None
        if pool is None or self._shape is None:
            return None
        ship = True
        try:
            request = read_request(self.model, input_ids, attention_mask, arguments)
            rows = [Row(*row, asked.name, asked.hints) for row in zip(request.tokens, request.padding, strict=True)]
            for index, row in enumerate(rows if len(rows) > 1 else ()):
                row.name = f"{asked.name}/{index}"
            self._filler.hash(pool, rows)
            if self._planning is not None:
                ship = self._planning.plan(pool, rows, request.new_tokens)
            if self._shipping is not None and ship:
                shipment = self._shipping.begin(cast(QueryPool, pool), rows)
                if shipment is None and self._planning is not None:
                    self._planning.could_not_ship()
            length = request.input_ids.shape[1] - 1
            before = 0 if shipment is None else min(row.padding + row.start for row in rows)
            room = 1 + length - before + min(request.new_tokens, MAX_EXPECTED_TOKENS)
            storage = allocate(self._shape, len(rows), room)
            place_rows(rows, storage, before, length)
            self._filler.fill(pool, rows, shipment)
            if shipment is None:
                cache = RoomyCache([RoomyLayer(keys, values, length) for keys, values in storage])
            else:
                cache = shipped_cache(rows, storage, before, length)
            if request.copies > 1:
                cache.batch_repeat_interleave(request.copies)
            return Batch(pool, request, rows, cache, shipment)
        except BaseException as error:
            if shipment is not None:
                shipment.close()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, NotServed):
                self._say(f"served without the pool: {error}")
            else:
                self._failed("prefill", error)
            return None

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


def _placement(model: Any) -> tuple[Any, Any]:
    """Device and dtype."""
    return model.device, model.dtype
