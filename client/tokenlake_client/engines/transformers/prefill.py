"""The caches of prompts: the known prefix is copied from the pool, the model computes the rest, and new segments go to
the writer."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix
from tokenlake_client.engines.common.counters import Counters
from tokenlake_client.engines.common.in_flight import LEAST_S, NO_WAIT, InFlightWait
from tokenlake_client.engines.common.pool import CacheLease, CachePool, RequestInfo
from tokenlake_client.engines.transformers.cache import RoomyCache, RoomyLayer
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.measurements import Measurements
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.request import Request, answer_of
from tokenlake_client.engines.transformers.rows import Row, cache_of_rows
from tokenlake_client.engines.transformers.segment_copy import LayerPair, SegmentCopier, SegmentCopy
from tokenlake_client.engines.transformers.shipped_cache import ShippedCache
from tokenlake_client.engines.transformers.writer import Writer, task_of

Forward = Callable[[ShippedCache, Callable[[], Any]], Any]
"""A function of (cache, forward pass) that runs the forward pass with a cache whose prefix is not stored in it."""
LEAST_LEFT_S = 0.001
"""Seconds: the limit of further fetches of a load whose limit has passed."""
LEAST_WAIT_S = 0.005
"""Seconds: a match that took longer than this counts as one that waited for another engine."""


class PartialLoad(Exception):
    """A load ended with an error. The first `tokens` tokens were loaded correctly."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the pool failed after {tokens} tokens")
        self.tokens = tokens


def load(
    pool: CachePool,
    keys: Sequence[SegmentKey],
    cache: SegmentCopy,
    window: int,
    measurements: Measurements,
    info: RequestInfo,
    found: int | None = None,
    held: CacheLease | None = None,
) -> int:
    """Copy the longest known prefix of `keys` into `cache` and return its length in tokens. Fetches `window` segments
    at a time, and releases them when their copies have ended.

    `found`: the number of segments that the pool had a moment ago; None: unknown. Where it pays
    (`Measurements.in_flight_wait`), the match waits for another engine that is computing the following segments. If no
    engine is, in-flight markers are set: other engines then wait for the caller, which must compute and store these
    segments at once.

    `held`: an earlier lease of the first `found` segments of the prompt. This call releases it, unless it raises; the
    caller releases it too.

    Raises `PartialLoad` from an error of the pool.
    """
    layout = pool.layout
    loaded = 0
    wait = measurements.in_flight_wait(layout, found or 0, len(keys))
    if wait is NO_WAIT:
        keys = keys[:found]
    began = time.perf_counter()
    try:
        lease = _lease(pool, keys, wait, info, held)
        if lease is None:
            return 0
        waited = wait is not NO_WAIT and time.perf_counter() - began > LEAST_WAIT_S
        with lease:
            hits = min(lease.hits, len(keys))
            nodes, disk_s = lease.sources() if lease.local_hits < lease.hits else ([], [])
            limit_s, fetch_s = measurements.fetch_limit_s(layout, hits), 0.0
            while loaded < hits:
                stop = min(loaded + window, hits)
                fetch_began = time.perf_counter()
                left_s = max(LEAST_LEFT_S, limit_s - fetch_s) if limit_s else 0.0
                segments = lease.fetch(loaded, stop, at_most_s=left_s)
                seconds = time.perf_counter() - fetch_began
                fetch_s += seconds
                count = len(segments)
                cache.read(segments, loaded * layout.segment_tokens)
                lost = count < stop - loaded
                if not lost and not any(disk_s[loaded:stop]):
                    # A fetch that lost segments is not measured: it may have ended at once, which says nothing about
                    # the speed of the nodes. The time of one that read from a disk is not that of the network.
                    remote = [node for node in nodes[loaded:stop] if node != pool.node]
                    measurements.fetched(remote, layout.segment_bytes, seconds)
                # The arrays keep their segments leased, so they are dropped before the release.
                del segments
                loaded += count
                tokens = loaded * layout.segment_tokens
                lease.takes(0, tokens, measurements.saved_s(tokens))
                lease.release(loaded - count, loaded)
                if lost:
                    break
    except Exception as error:
        raise PartialLoad(loaded * layout.segment_tokens) from error
    if not nodes and not waited:
        measurements.copied(loaded * layout.segment_bytes, time.perf_counter() - began)
    return loaded * layout.segment_tokens


def _lease(
    pool: CachePool, keys: Sequence[SegmentKey], wait: InFlightWait, info: RequestInfo, held: CacheLease | None
) -> CacheLease | None:
    """A lease of the segments to read: `held` itself, or one of a new match, after which `held` is released. Sets
    in-flight markers for the missing segments if the wait for them is worthwhile for other engines."""
    if wait is NO_WAIT and keys and held is not None and held.unreleased >= len(keys):
        return held
    lease = None
    try:
        if keys:
            lease = pool.match(keys, info.match_options(wait))
    finally:
        # `held` is released after the match, not before: otherwise the segments would count as used twice, when they
        # are released and when they are matched.
        if held is not None:
            held.release(counted=lease is None)
    marker_s = wait.seconds(len(keys) - lease.hits) if lease is not None else 0.0
    if lease is not None and marker_s >= LEAST_S:
        # The match itself has marked only the first missing segment. The daemon removes all markers when this process
        # ends.
        try:
            pool.mark_in_flight(keys[lease.hits :], marker_s)
        except BaseException:
            lease.release()
            raise
    return lease


def compute(
    model: Any,
    tokens: Sequence[int],
    cache: Any,
    chunk: int,
    measurements: Measurements,
    run: Callable[[Callable[[], Any]], Any] | None = None,
) -> None:
    """Compute the cache of `tokens` into `cache`, which holds their beginning already, with forward passes of one row
    and at most `chunk` tokens. `run` executes a forward pass; None: the pass is called directly and measured."""
    known = cache.get_seq_length()
    if known == len(tokens):
        return
    # The logits are not needed, and those of a whole prompt would be vocabulary x tokens numbers.
    accepts = inspect.signature(model.forward).parameters
    extras = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
    ids = torch.tensor([list(tokens[known:])], dtype=torch.long, device=model.device)
    with torch.no_grad():
        for start in range(known, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            forward = partial(
                model,
                input_ids=ids[:, start - known : stop - known],
                position_ids=torch.arange(start, stop, device=model.device)[None],
                past_key_values=cache,
                use_cache=True,
                **extras,
            )
            if run is not None:
                run(forward)
                continue
            with measurements.prefill(stop - start, start, model.device):
                forward()


class Prefiller:
    """Fills the caches of the prompts of a batch (its rows). After an error of the pool, which is reported, the tokens
    are computed. For one model."""

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        writer: Writer,
        copier: SegmentCopier,
        counters: Counters[Counts],
        measurements: Measurements,
        pool_failed: Callable[[str, BaseException], None],
    ) -> None:
        self._model = model
        self._options = options
        self._writer = writer
        self._copier = copier
        self._counters = counters
        self._measurements = measurements
        self._pool_failed = pool_failed

    def hash(self, pool: CachePool, rows: list[Row]) -> None:
        """Hash the keys of the prompts' segments; they stay unset after an error of the pool."""
        started = time.perf_counter()
        try:
            for row in rows:
                row.chain = self._chain(pool, row.tokens)
        except Exception as error:
            self._pool_failed("reading segments", error)
        self._counters.add(pool_seconds=time.perf_counter() - started)

    def fill(self, pool: CachePool | None, rows: list[Row], forward: Forward | None = None) -> None:
        """Fill the layers of the prompts in `rows` with the cache of all their tokens but the last, and queue the new
        segments to be stored. `forward`: runs the forward passes of prompts whose prefix is not stored in the engine
        (`Row.shared`). Raises the errors of the model.

        The new segments of a prompt are queued before the next prompt is looked up: if the next prompt begins with the
        same segments, its match waits for them as that of another engine would.
        """
        chunk = self._options.prefill_chunk
        for row in rows:
            if forward is not None and row.shared is not None:
                cache = cache_of_rows([Row(row.tokens, shared=row.shared)], row.layers, row.start, row.start)
                compute(self._model, row.tokens[:-1], cache, chunk, self._measurements, partial(forward, cache))
            else:
                if pool is not None and row.chain is not None:
                    self._load(pool, row)
                own = RoomyCache([RoomyLayer(keys, values, row.loaded) for keys, values in row.layers])
                compute(self._model, row.tokens[:-1], own, chunk, self._measurements)
            if pool is not None and row.chain is not None:
                layers = [(keys[0], values[0]) for keys, values in row.layers]
                self._store(pool, row, row.chain, row.known, len(row.tokens) - 1, layers)

    def store_decoded(
        self, pool: CachePool, request: Request, rows: Sequence[Row], cache: RoomyCache, sequences: list[list[int]]
    ) -> None:
        """Queue the segments that decode completed, to be stored with the hints of the request's end. They cover those
        tokens of each sequence, up to its end, that were fed to the model; the last token was not. The segments of the
        prompt are stored already and get the hints by a message; if a row has several sequences, the hints are those of
        the first sequence's end."""
        for index, sequence in enumerate(sequences):
            row = rows[index // request.copies]
            if row.chain is None:
                continue
            prompt = len(row.tokens)
            answer, reason = answer_of(request, sequence[row.padding + prompt :])
            fed = (row.tokens + answer)[: cache.get_seq_length() - row.padding]
            chain = row.chain if request.copies == 1 else self._chain(pool, row.tokens)
            chain.extend(fed[prompt:])
            layers = cache.row(index, row.padding + row.start)
            ended = replace(row, hints=_ended(row.hints, reason, len(answer)))
            hint_prompt = index % request.copies == 0
            self._store(pool, ended, chain, prompt - 1, len(fed), layers, hint_prompt=hint_prompt)

    def _chain(self, pool: CachePool, tokens: list[int]) -> Prefix:
        return pool.prefix(tokens, adapter=self._options.adapter, salt=self._options.salt)

    def _load(self, pool: CachePool, row: Row) -> None:
        """Copy the known prefix of the row's prompt from the pool into the row's layers, and set `row.loaded` to its
        number of tokens."""
        started = time.perf_counter()
        try:
            keys = row.keys_to_match(pool.layout.segment_tokens)
            layers = [(keys_[0], values[0]) for keys_, values in row.layers]
            cache = self._copier.bind(pool.layout, layers)
            row.loaded = load(
                pool, keys, cache, self._options.window, self._measurements, row.info, row.found, row.lease
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
        hint_prompt: bool = False,
    ) -> None:
        """Queue the full segments among tokens [`known`, `tokens`) of a sequence that begins with the prompt of `row`.
        `layers` hold its tokens [`row.start`, `tokens`). `hint_prompt`: also send the row's hints for the segments
        before them."""
        try:
            first = known // pool.layout.segment_tokens
            keys = chain.keys[first : tokens // pool.layout.segment_tokens]
            hinted = chain.keys[:first] if hint_prompt else ()
            if keys or hinted:
                # A task that only sends hints must not keep the key and value tensors alive.
                cache = self._copier.bind(pool.layout, layers if keys else [])
                self._writer.submit(task_of(pool, pool.layout, keys, first, cache, row.start, row.info, hinted))
        except Exception as error:
            self._pool_failed("storing segments", error)


def _ended(hints: Hints | None, reason: str, output_tokens: int) -> Hints:
    """The caller's hints, completed with the reason why the request ended and the number of tokens of its answer. The
    caller's own statements about the end take precedence."""
    given = hints or NO_HINTS
    return given.ended(given.stop_reason or reason, output_tokens if given.output_tokens < 0 else -1)
