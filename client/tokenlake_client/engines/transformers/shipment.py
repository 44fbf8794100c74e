"""One batch whose prefixes are attended where they lie.

Of each layer the queries go out first; attention over the batch's own tokens runs meanwhile; then both are merged.

When a part is LOST the step is *void*: the exception ends the forward pass in its middle, the cache is cut to what
it held before the step, each lost prefix is brought here (what the pool still has is fetched, the rest computed), and
the forward pass is called again with the same arguments. Whoever called it, `generate` for one, sees one pass that
took longer: no token, no random number, no call of a streamer happens between the two.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from tokenlake_client.engines.base import QueryPool
from tokenlake_client.engines.transformers.attention import QueryShape, attending
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.measured import Measured
from tokenlake_client.engines.transformers.partial import Part, attend, attend_own, merge_rows
from tokenlake_client.engines.transformers.shipped import SharedPrefix, ShippedCache

__all__ = ["Shipment", "Void"]

T = TypeVar("T")

PAIRS = 1 << 22
"""Pairs of query token and prefix token in a layer that may take one `deadline_s`."""


class Void(Exception):
    """This forward pass is worth nothing: these prefixes are not where they were."""

    def __init__(self, prefixes: Sequence[SharedPrefix]) -> None:
        super().__init__(f"{len(prefixes)} prefixes are lost")
        self.prefixes = prefixes


@dataclass(slots=True)
class _Asked:
    """A query that is out."""

    prefixes: list[tuple[SharedPrefix, list[int]]]
    ticket: Any
    nbytes: int = 0
    """That went over the network."""


class Shipment:
    """Runs forward passes of `ShippedCache`s. Close it when the batch is done: its views end there. For one thread."""

    def __init__(
        self,
        model: Any,
        pool: QueryPool,
        shape: QueryShape,
        counters: Counters,
        measured: Measured,
        deadline_s: float,
        recover: Callable[[SharedPrefix], None],
        report: Callable[[str, BaseException], None],
    ) -> None:
        """`recover` gives a prefix its `local` and takes its view; it raises only what the model raises. `report` is
        told of what went wrong in the pool."""
        self._model = model
        self._pool = pool
        self._shape = shape
        self._counters = counters
        self._measured = measured
        self._deadline_s = deadline_s
        self._recover = recover
        self._report = report
        self._prefixes: list[SharedPrefix] = []
        self._cache: ShippedCache | None = None
        self._buffer: Any = None
        self._parts: list[tuple[Any, int]] = []

    def add(self, prefix: SharedPrefix) -> None:
        """Its view is closed with the shipment."""
        self._prefixes.append(prefix)

    def run(self, cache: ShippedCache, forward: Callable[[], T]) -> T:
        """`forward()`, a forward pass of the model with `cache`, as often as it takes until it is whole. Raises what
        the model raises."""
        length = cache.get_seq_length()
        while True:
            self._cache = cache
            try:
                with attending(self._model, self):
                    return forward()
            except Void as void:
                lost = void.prefixes
            finally:
                self._cache = None
            cache.shorten(length)
            self._counters.add(steps_void=1)
            self._drop_buffer()
            for prefix in lost:
                self._recover(prefix)

    @contextlib.contextmanager
    def serving(self, cache: ShippedCache) -> Iterator[None]:
        """Within it, all forward passes of the model with `cache` go through `run`, whoever calls them."""
        own = self._model.__dict__.get("forward")
        forward = self._model.forward

        @wraps(forward)
        def shipped(*args: Any, **arguments: Any) -> Any:
            if arguments.get("past_key_values") is not cache:
                return forward(*args, **arguments)
            return self.run(cache, lambda: forward(*args, **arguments))

        self._model.forward = shipped
        try:
            yield
        finally:
            if own is None:
                del self._model.forward
            else:
                self._model.forward = own

    def close(self) -> None:
        """Give back views and memory. Never raises."""
        self._drop_buffer()
        for prefix in self._prefixes:
            if prefix.view is not None:
                prefix.view.close()
                prefix.view = None

    def attend(self, module: Any, query: Any, keys: Any, values: Any, scale: float, others: dict[str, Any]) -> Any:
        """Attention over prefixes and own tokens. Raises `Void`."""
        assert self._cache is not None
        began = time.perf_counter()
        asked = self._ask(self._cache, module.layer_idx, query)
        mask = self._cache.mask(query.shape[2], keys.shape[2], query.device)
        own = time.perf_counter()
        whole = attend_own(query, keys, values, scale, mask)
        began += time.perf_counter() - own
        for prefix, rows in self._cache.prefixes:
            if prefix.local is not None:
                whole = merge_rows(whole, rows, _over_local(query[rows], prefix.local[module.layer_idx], scale))
        if asked is not None:
            for rows, part in self._answered(asked, query):
                whole = merge_rows(whole, rows, part)
            self._note(asked, query.shape[2], time.perf_counter() - began)
        return whole.out

    def _ask(self, cache: ShippedCache, layer: int, query: Any) -> _Asked | None:
        """Send the queries of all rows whose prefix is elsewhere. Raises `Void`."""
        shipped = [(prefix, rows) for prefix, rows in cache.prefixes if prefix.view is not None]
        if not shipped:
            return None
        try:
            count = query.shape[2]
            self._prepare([(prefix.view, len(rows) * count) for prefix, rows in shipped])
            target = _tensor(self._buffer.queries, query.dtype)
            at = 0
            for _, rows in shipped:
                shape = (len(rows), count, *target.shape[1:])
                part = target[at : at + len(rows) * count].view(shape)
                part.copy_((query if rows == list(range(len(query))) else query[rows]).transpose(1, 2))
                at += len(rows) * count
            pairs = sum(count * len(rows) * len(prefix.tokens) for prefix, rows in shipped)
            deadline_s = self._deadline_s * (1 + pairs // PAIRS)
            return _Asked(shipped, self._pool.query(self._buffer, layer, deadline_s=deadline_s))
        except Exception as error:
            self._report("asking for attention over a prefix", error)
            raise Void([prefix for prefix, _ in shipped]) from error

    def _answered(self, asked: _Asked, query: Any) -> Iterator[tuple[list[int], Part]]:
        """Of each prefix, its rows and the result. Raises `Void` before the first, or never."""
        answer = asked.ticket.wait()
        asked.nbytes = answer.sent_bytes + answer.received_bytes
        self._counters.add(bytes_sent=answer.sent_bytes, bytes_received=answer.received_bytes)
        if answer.lost:
            raise Void([asked.prefixes[part][0] for part in answer.lost])
        output, sums = torch.from_numpy(answer.output), torch.from_numpy(answer.sums)
        count, at = query.shape[2], 0
        for _, rows in asked.prefixes:
            stop = at + len(rows) * count
            out = output[at:stop].view(len(rows), count, *output.shape[1:]).transpose(1, 2)
            lse = sums[at:stop].view(len(rows), count, -1).transpose(1, 2)
            yield rows, Part(out.to(query.device), lse.to(query.device))
            at = stop

    def _note(self, asked: _Asked, count: int, seconds: float) -> None:
        """A layer took so much longer than attention over its own tokens."""
        elsewhere = [node for prefix, _ in asked.prefixes for node in prefix.elsewhere]
        # Nothing travels once the query engine has brought here what others did not answer for.
        if elsewhere and asked.nbytes:
            sent = count * sum(len(rows) * len(set(prefix.elsewhere)) for prefix, rows in asked.prefixes)
            self._counters.add(queries_sent=sent)
            queries = count * sum(len(rows) for prefix, rows in asked.prefixes if prefix.elsewhere)
            self._measured.queried(elsewhere, self._pool.layout.segment_tokens, queries, asked.nbytes, seconds)

    def _prepare(self, parts: list[tuple[Any, int]]) -> None:
        """A buffer for these (view, tokens): the one of the step before when they are the same."""
        if self._buffer is None or parts != self._parts or self._buffer.spent:
            self._drop_buffer()
            self._buffer = self._pool.init_query(parts)
            self._parts = parts

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def _over_local(query: Any, pair: tuple[Any, Any], scale: float) -> Part:
    """Attention of several rows over one prefix: the rows are more queries of one row."""
    rows, heads, tokens, dim = query.shape
    folded = query.transpose(0, 1).reshape(1, heads, rows * tokens, dim)
    out, lse = attend(folded, *pair, scale)
    return Part(
        out.view(heads, rows, tokens, -1).transpose(0, 1),
        lse.view(heads, rows, tokens).transpose(0, 1),
    )


def _tensor(array: Any, dtype: Any) -> Any:
    """The memory of a numpy array as a tensor: bfloat16 comes as uint16."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
