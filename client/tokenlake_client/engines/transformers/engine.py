"""A transformers model that uses the pool for the known prefixes of its prompts."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenlake.attention import AttentionShape
from tokenlake.errors import LayoutRefused, Unreachable
from tokenlake.hints import Hints
from tokenlake.layout import Layout
from tokenlake.planner import Rates
from tokenlake_client.engines.common.connection import Connection, declined
from tokenlake_client.engines.common.reports import Counters, Reports
from tokenlake_client.engines.common.request import RequestInfo
from tokenlake_client.engines.common.span import EngineSpan, engine_span
from tokenlake_client.engines.transformers.attention import query_shape
from tokenlake_client.engines.transformers.cache import CacheShape, RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.identity import cache_shape, check_model, layout_of
from tokenlake_client.engines.transformers.measurements import Measurements
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.parts import Parts
from tokenlake_client.engines.transformers.planner import BatchPlanner
from tokenlake_client.engines.transformers.prefill import Prefiller
from tokenlake_client.engines.transformers.request import NotServed, Request, check_state, read_request
from tokenlake_client.engines.transformers.rows import Row, cache_of_rows, place_rows
from tokenlake_client.engines.transformers.segment_copy import SegmentCopier
from tokenlake_client.engines.transformers.shipping import Shipment, Shipping
from tokenlake_client.engines.transformers.writer import Writer, task_of
from tokenlake_client.pool import Pool
from tokenlake_client.weights import digest_of_version

logger = logging.getLogger("tokenlake.transformers")

MAX_EXPECTED_TOKENS = 1024
"""The largest number of new tokens for which the cache has capacity at the start of an answer; a longer answer enlarges
it later."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The cache of all but the last token of a prompt, to be passed to `model.generate` as `past_key_values`."""

    cache: RoomyCache
    tokens_hit: int
    tokens_computed: int
    """The number of tokens of the prompt that were not found in the pool, including the last one, which the caller
    computes."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A call of `generate` whose prompts are prefilled with the pool."""

    pool: Pool
    request: Request
    rows: list[Row]
    cache: RoomyCache
    shipment: Shipment | None


class TokenLakeEngine:
    """Wraps a model: its `prefill` and `generate` read known prefixes from the pool and store new segments there.

    An error of the pool does not reach the caller: it is logged once and counted, and the tokens are computed. A model
    that the pool cannot serve is named in the log once, and runs without the pool. As with the model itself, one thread
    at a time may use the engine.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool | str | Path | None = None,
        options: EngineOptions | None = None,
        copier: SegmentCopier | None = None,
    ) -> None:
        """`pool`: the daemon's socket, or a pool of this model's layout that the caller owns. With a socket, the
        constructor makes one attempt to connect, and requests make later ones. `copier`: the copies between the pool
        and the caches of this engine alone (default: with the drivers of the model's devices)."""
        self.model = model
        self.options = options or EngineOptions()
        self.layout: Layout | None = None
        self._counters = Counters(Counts)
        self._reports = Reports(logger, self._counters)
        self._source = pool
        self._writer = Writer(
            self._counters,
            self._pool_failed,
            self._reports.warn,
            tasks=self.options.write_queue,
            patience=self.options.write_patience,
        )
        self.rates = Rates()
        """The measured times of this engine's work, for its own plans and for those of a scheduler."""
        self._measurements = Measurements(self.rates)
        self._copier = copier or SegmentCopier()
        self._parts = Parts(
            model=model,
            options=self.options,
            counters=self._counters,
            measurements=self._measurements,
            copier=self._copier,
            writer=self._writer,
            failed=self._reports.failure,
            pool_failed=self._pool_failed,
        )
        self._prefiller = Prefiller(self._parts)
        self._connection = Connection(None, self._reports.failure)
        self._shape: CacheShape | None = None
        self._placed: tuple[Any, Any] | None = None
        """The model's device and dtype when the shape of its cache was measured; None before."""
        self._shipping: Shipping | None = None
        self._planner: BatchPlanner | None = None
        self._base_digest = ""
        self._name = secrets.token_hex(4)
        self._requests = itertools.count(1)
        if pool is not None:
            self._open(self.options.weights_digest)

    @property
    def counts(self) -> Counts:
        """A copy of the engine's counts so far."""
        return self._counters.read()

    def prefill(
        self,
        token_ids: Sequence[int],
        *,
        request: str | None = None,
        hints: Hints | None = None,
        traceparent: str | None = None,
    ) -> Prefill:
        """The cache of all `token_ids` (at least one) but the last. It holds the whole prefix, also in mode `ship`. New
        segments are stored in the background. `request`: the name of the request in the logs of all nodes and for
        `tokenlake explain`. `hints`: hints of the request (`tokenlake.hints`). `traceparent`: the span of the caller,
        as of `MatchOptions`; None: the present span of this thread, if the program makes spans with OpenTelemetry. In
        such a program the engine makes a span too.

        Without a pool, or with a model that it cannot serve, the cache is computed. Raises the errors of the model, and
        ValueError for an empty prompt.
        """
        tokens = list(token_ids)
        if not tokens:
            raise ValueError("a prompt has at least one token")
        with engine_span("tokenlake.prefill", traceparent) as span:
            filled = self._filled(tokens, RequestInfo(self._named(request), hints, traceparent=span.traceparent))
            span.note({"tokens.asked": len(tokens), "tokens.loaded": filled.tokens_hit})
        return filled

    def _filled(self, tokens: list[int], info: RequestInfo) -> Prefill:
        if self._shape is None:
            self._shape, self._placed = cache_shape(self.model), _placement(self.model)
        pool = self._usable_pool()
        shape = self._shape if self._placed == _placement(self.model) else cache_shape(self.model)
        storage = allocate(shape, 1, len(tokens))
        row = Row(tokens, name=info.name, hints=info.hints, traceparent=info.traceparent)
        place_rows([row], storage, 0, len(tokens) - 1)
        if pool is not None:
            self._prefiller.hash(pool, [row])
        self._prefiller.fill(pool, [row])
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
        traceparent: str | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """The result of `model.generate` for the same arguments. `request`, `hints` and `traceparent`: as in `prefill`,
        for all rows; the names of several rows end in `/0`, `/1` and so on.

        Calls that the pool cannot serve (beam search, assisted decoding, a cache or embeddings given by the caller,
        padding that is not on the left) go to the model unchanged.
        """
        with engine_span("tokenlake.generate", traceparent) as span:
            info = RequestInfo(self._named(request), hints, traceparent=span.traceparent)
            return self._generate(input_ids, attention_mask, generate_kwargs, info, span)

    def _generate(
        self,
        input_ids: Any,
        attention_mask: Any,
        generate_kwargs: dict[str, Any],
        info: RequestInfo,
        span: EngineSpan,
    ) -> Any:
        batch = self._prepare(input_ids, attention_mask, generate_kwargs, info)
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
            span.note(
                {
                    "tokens.asked": sum(len(row.tokens) for row in batch.rows),
                    "tokens.loaded": sum(row.loaded for row in batch.rows),
                }
            )
            if shipment is not None:
                shipment.close()
        try:
            sequences = output if not hasattr(output, "sequences") else output.sequences
            steps = sequences.shape[1] - mask.shape[1]
            self._measurements.answered(steps)
            if shipment is None:
                self._measurements.decode(
                    len(sequences), mask.shape[1] + steps // 2, steps, time.perf_counter() - began
                )
            self._prefiller.store_decoded(batch.pool, batch.request, batch.rows, batch.cache, sequences.tolist())
        except Exception as error:
            self._reports.failure("storing segments that decode completed", error)
        return output

    def hint(self, token_ids: Sequence[int], hints: Hints) -> None:
        """Send hints about a conversation with these tokens, for example that it goes on or is over. The hints are sent
        in the background, after the segments that were computed before were stored. Without a pool they are lost. Never
        raises."""
        try:
            pool, layout = self._connection.get(), self.layout
            if pool is not None and layout is not None:
                chain = pool.prefix(list(token_ids), adapter=self.options.adapter, salt=self.options.salt)
                nothing = self._copier.bind(layout, ())
                info = RequestInfo(hints=hints)
                self._writer.submit(task_of(pool, layout, (), 0, nothing, info=info, hinted=chain.keys))
        except Exception as error:
            self._pool_failed("sending hints", error)

    def new_weights(self, version: str, pool: Pool | None = None) -> None:
        """To be called when the model's weights were changed in place. From now on segments are shared with engines
        that started from the same weights and have the same `version`.

        An engine that was given a pool instead of a socket needs a `pool` of the new layout (see `layout`), and serves
        without a pool until it has one.
        """
        self._writer.flush()
        self._connection.close()
        if self.layout is None:
            return
        if not isinstance(self._source, (str, Path)):
            self._source = pool
        self._open(digest_of_version(self._base_digest, version), keep_base=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all computed segments are stored; False when `timeout` seconds were not enough."""
        return self._writer.flush(timeout)

    def close(self, timeout: float | None = 10.0) -> None:
        """Store the waiting segments, for at most `timeout` seconds, and close a connection that the engine opened."""
        self._writer.close(timeout)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, weights_digest: str | None, *, keep_base: bool = False) -> None:
        """Find the model's layout and connect to the pool. After an error the engine has no pool."""
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
                raise LayoutRefused(f"the pool's layout differs from the model's, {self.layout}")
        except Exception as error:
            self._reports.failure(f"serving {type(self.model).__name__} with the pool", error)
            if isinstance(source, (str, Path)):
                self._connection = declined(source, options.daemon_uid, f"{type(self.model).__name__}: {error}")
            return
        if options.mode != "fetch":
            self._begin_shipping(self._shape, self.layout)
        if isinstance(source, (str, Path)):
            self._connection = Connection(lambda: self._connect(source), self._reports.failure)
        elif given is not None:
            self._connection = Connection(None, self._reports.failure, given)

    def _begin_shipping(self, shape: CacheShape, layout: Layout) -> None:
        attention = None
        try:
            queries = query_shape(self.model, shape)
            attention = AttentionShape.of(layout, queries.heads, queries.scale)
            self._shipping = Shipping(self._parts, shape, queries)
        except Exception as error:
            self._reports.warn(
                f"mode '{self.options.mode}': prefixes of {type(self.model).__name__} are fetched: {error}"
            )
        if self.options.mode == "auto":
            self._planner = BatchPlanner(self._parts, layout, attention, self.rates)

    def _segment_tokens(self, given: Pool | None) -> int:
        """The number of tokens per segment: that of the `given` pool, else of the present layout, else of the
        options."""
        known = self.layout if given is None else given.layout
        return self.options.segment_tokens if known is None else known.segment_tokens

    def _connect(self, socket: str | Path) -> Pool:
        # The import is here, because an engine that was given a pool does not need the client's connection code.
        from tokenlake_client.pool import Pool

        assert self.layout is not None
        options = self.options
        pool: Pool = Pool.connect(
            socket, self.layout, options.credential, daemon_uid=options.daemon_uid, deadlines=options.deadlines
        )
        return pool

    def _usable_pool(self) -> Pool | None:
        """The pool that the next request may use; None while there is no connection, or while the state of the model
        does not allow its cache to be shared."""
        try:
            pool = self._connection.get()
            if pool is not None:
                check_state(self.model, self.options.adapter)
                if self._placed != _placement(self.model):
                    raise NotServed(f"the model was on {self._placed}, and is on {_placement(self.model)}")
            return pool
        except NotServed as reason:
            self._reports.warn(f"served without the pool: {reason}")
        except Exception as error:
            self._reports.failure("reaching the pool", error)
        return None

    def _named(self, request: str | None) -> str:
        return f"{self._name}-{next(self._requests)}" if request is None else request

    def _prepare(
        self, input_ids: Any, attention_mask: Any, arguments: dict[str, Any], info: RequestInfo
    ) -> _Batch | None:
        """Fill the cache of all prompts of a batch except for their last tokens. Returns None if the model alone must
        serve the call, without the pool."""
        pool, shipment = self._usable_pool(), None
        if pool is None or self._shape is None:
            return None
        ship = True
        rows: list[Row] = []
        try:
            request = read_request(self.model, input_ids, attention_mask, arguments)
            rows = [
                Row(*row, info.name, info.hints, info.traceparent)
                for row in zip(request.tokens, request.padding, strict=True)
            ]
            for index, row in enumerate(rows if len(rows) > 1 else ()):
                row.name = f"{info.name}/{index}"
            self._prefiller.hash(pool, rows)
            if self._planner is not None:
                ship = self._planner.plan(pool, rows, request.new_tokens)
            if self._shipping is not None and ship:
                shipment = self._shipping.begin(pool, rows)
                if shipment is None and self._planner is not None:
                    self._planner.could_not_ship()
            length = request.input_ids.shape[1] - 1
            before = 0 if shipment is None else min(row.padding + row.start for row in rows)
            room = 1 + length - before + min(request.new_tokens, MAX_EXPECTED_TOKENS)
            storage = allocate(self._shape, len(rows), room)
            place_rows(rows, storage, before, length)
            self._prefiller.fill(pool, rows, None if shipment is None else shipment.run)
            if shipment is None:
                cache = RoomyCache([RoomyLayer(keys, values, length) for keys, values in storage])
            else:
                cache = cache_of_rows(rows, storage, before, length)
            if request.copies > 1:
                cache.batch_repeat_interleave(request.copies)
            return _Batch(pool, request, rows, cache, shipment)
        except BaseException as error:
            if shipment is not None:
                shipment.close()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, NotServed):
                self._reports.warn(f"served without the pool: {error}")
            else:
                self._reports.failure("prefill", error)
            return None
        finally:
            for row in rows:
                # The load has released the lease, unless an error came first.
                with suppress(Exception):
                    row.release_lease()

    def _pool_failed(self, operation: str, error: BaseException) -> None:
        self._reports.failure(operation, error)
        # A call that the daemon did not answer may have cost a deadline, so the pool is not used for a while after it.
        # Any other error came at once, perhaps from the values of one request: the pool serves the next one.
        if isinstance(error, Unreachable):
            self._connection.failed()


def _placement(model: Any) -> tuple[Any, Any]:
    """Device and dtype of the model."""
    return model.device, model.dtype
