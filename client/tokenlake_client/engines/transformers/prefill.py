"""The cache of one prompt: its known prefix from the pool, the rest from the model."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.base import Asked, CacheLease, CachePool
from tokenlake_client.engines.transformers.measured import IMPATIENT, LEAST_S, Measured, Patience
from tokenlake_client.engines.transformers.slots import LayerPair, read_segments
from tokenlake_client.match import MatchOptions

__all__ = ["PartialLoad", "compute", "load"]

LEAST_WAIT_S = 0.005
"""A match that waited took as long."""


class PartialLoad(Exception):
    """Loading ended by an error after `tokens` tokens, which are right."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the pool failed after {tokens} tokens")
        self.tokens = tokens


def load(
    pool: CachePool,
    keys: Sequence[SegmentKey],
    layers: Sequence[LayerPair],
    window: int,
    measured: Measured,
    asked: Asked,
    found: int | None = None,
    held: CacheLease | None = None,
) -> int:
    """Copy the longest known prefix of `keys` into `layers` ([heads, tokens, dim] each) and return its
    length in tokens. Leases at most `window` segments longer than their copy takes.

    `found`: segments that the pool had a moment ago; None: it was not asked. Whoever computes what comes next is waited
    for (`Measured.patience`). Where nobody does, others wait for the caller, who is to compute and store it at once.

    `held`: the lease of what was found, of which the first are `keys`. It is taken over.

    Raises `PartialLoad` from whatever the pool raised.
    """
    layout = pool.layout
    loaded = 0
    patience = measured.patience(layout, found or 0, len(keys))
    if patience is IMPATIENT:
        keys = keys[:found]
    began = time.perf_counter()
    try:
        lease = _lease(pool, keys, patience, asked, held)
        if lease is None:
            return 0
        waited = patience is not IMPATIENT and time.perf_counter() - began > LEAST_WAIT_S
        with lease:
            hits = min(lease.hits, len(keys))
            nodes = lease.nodes() if lease.local_hits < lease.hits else []
            while loaded < hits:
                stop = min(loaded + window, hits)
                fetch_began = time.perf_counter()
                segments = lease.fetch(loaded, stop)
                seconds = time.perf_counter() - fetch_began
                count = len(segments)
                read_segments(segments, layout, layers, loaded * layout.segment_tokens)
                lost = count < stop - loaded
                if not lost:
                    # Who loses segments may say so at once: that is not fast.
                    remote = [node for node in nodes[loaded:stop] if node != pool.node]
                    measured.fetched(remote, layout.segment_bytes, seconds)
                # Views keep their segments leased: they go before the release.
                del segments
                lease.release(loaded, loaded + count)
                loaded += count
                if lost:
                    break
    except Exception as error:
        raise PartialLoad(loaded * layout.segment_tokens) from error
    if not nodes and not waited:
        measured.copy(loaded * layout.segment_bytes, time.perf_counter() - began)
    return loaded * layout.segment_tokens


def _lease(
    pool: CachePool, keys: Sequence[SegmentKey], patience: Patience, asked: Asked, held: CacheLease | None
) -> CacheLease | None:
    """What is to be read, in place of `held`; and what comes next is claimed, where others may wait for it."""
    if patience is IMPATIENT and keys and held is not None:
        return held
    lease = None
    try:
        if keys:
            options = MatchOptions(
                request=asked.name,
                hints=asked.hints,
                prompt_tokens=asked.tokens,
                in_flight_wait_s=patience.in_flight_wait_s,
                in_flight_wait_per_segment_s=patience.segment_s,
            )
            lease = pool.match(keys, options)
    finally:
        # Not before: what was given back was used, and would be found as used twice.
        if held is not None:
            held.release()
    claim_s = patience.seconds(len(keys) - lease.hits) if lease is not None else 0.0
    if lease is not None and claim_s >= LEAST_S:
        # The match claimed the first of them, for as long. But these claims end with this process if it dies.
        pool.claim(keys[lease.hits :], claim_s)
    return lease


def compute(
    model: Any,
    tokens: Sequence[int],
    cache: Any,
    chunk: int,
    measured: Measured,
    run: Callable[[Callable[[], Any]], Any] | None = None,
) -> None:
    """Extend `cache`, which holds the first of `tokens`, by the others, with forward passes of one row and at most
    `chunk` tokens. `run` calls each of them (default: as it is, and then it is measured)."""
    known = cache.get_seq_length()
    if known == len(tokens):
        return
    # The logits of a prompt are vocabulary x tokens; nobody reads them.
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
            with measured.prefill(stop - start, start, model.device):
                forward()
