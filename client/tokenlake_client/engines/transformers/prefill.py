"""The cache of one prompt: its known prefix from the pool, the rest from the model."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake_client.engines.base import Asked, CacheLease, CachePool
from tokenlake_client.engines.transformers.measured import Measured
from tokenlake_client.engines.transformers.slots import LayerPair, read_segments

__all__ = ["PartialLoad", "compute", "load"]


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
) -> int:
    """Copy the longest known prefix of `keys` into `layers` ([heads, tokens, dim] each) and return its
    length in tokens. Leases at most `window` segments longer than their copy takes.

    `found`: segments that the pool had a moment ago; None: it is asked. Whoever computes what comes next is waited for
    (`Measured.patience_s`). Where nobody does, others wait for the caller, who is to compute and store it at once.

    Raises `PartialLoad` from whatever the pool raised.
    """
    layout = pool.layout
    loaded = 0
    patience_s = 0.0 if found is None else measured.patience_s(layout, found, len(keys))
    if not patience_s:
        keys = keys[:found]
    if not keys:
        return 0
    ask = partial(pool.match, request=asked.name, advice=asked.advice, tokens=asked.tokens)
    began = time.perf_counter()
    try:
        if found is None:
            lease, patience_s = _look(ask, keys, layout, measured)
        else:
            lease = ask(keys, pending_s=patience_s)
        with lease:
            nodes = lease.nodes() if lease.local_hits < lease.hits else []
            while loaded < lease.hits:
                stop = min(loaded + window, lease.hits)
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
    if not nodes and not patience_s:
        measured.copy(loaded * layout.segment_bytes, time.perf_counter() - began)
    return loaded * layout.segment_tokens


def _look(
    ask: Callable[..., CacheLease], keys: Sequence[SegmentKey], layout: Layout, measured: Measured
) -> tuple[CacheLease, float]:
    """Lease what there is of `keys` after whatever wait that is worth; and how long it may have been."""
    first = ask(keys)
    patience_s = measured.patience_s(layout, first.hits, len(keys))
    if not patience_s:
        return first, 0.0
    later = None
    try:
        later = ask(keys, pending_s=patience_s)
    finally:
        # Not before: to be found again would be another use. A session that may not lease it twice keeps the first.
        if later is None or later.hits >= first.hits:
            first.release()
    if later.hits >= first.hits:
        return later, patience_s
    later.release()
    return first, patience_s


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
