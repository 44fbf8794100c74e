"""New cache on its way into the pool, layer by layer, while the engine computes the next ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

from numpy.typing import NDArray

from tokenlake.attention import SlotMap, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client.write import Write

__all__ = ["LayerCache", "Transfer"]

log = logging.getLogger(__name__)

LayerCache = tuple[NDArray[Any], NDArray[Any]]
"""Keys [kv heads, tokens, key dim] and values [kv heads, tokens, value dim] of one layer of one part, of any strides,
in the layout's dtype (bfloat16 as uint16). `tokens` are those of the part's segments. Of latent attention values are
not looked at."""


class Transfer:
    """Segments of several prompts that were reserved together. Committed once all layers are in. For one thread; the
    copies are another's."""

    def __init__(self, layout: Layout, writes: Sequence[Write], executor: Executor) -> None:
        """Use `Pool.init_transfer`. Takes the writes over."""
        self._layout = layout
        self._slots = SlotMap.of(layout)
        self._writes = list(writes)
        self._executor = executor
        self._missing = set(range(layout.layers))
        self._copies: list[Future[None]] = []
        self._failed = False

    def put(self, layer: int, parts: Sequence[LayerCache]) -> None:
        """Copy one layer of every part behind the caller's back: the arrays must stay as they are until `wait`, or
        until `copied` says so. With the last layer everything is committed.

        Raises `LayoutRefused` for arrays that do not fit, and for a layer that the layout does not have or that was
        put before. What goes wrong with the pool is in `codes`.
        """
        if layer not in self._missing:
            left = ", ".join(map(str, sorted(self._missing))) or "none"
            raise LayoutRefused(f"layer {layer} was put before, or is none of the layout's; still to come: {left}")
        if len(parts) != len(self._writes):
            raise LayoutRefused(f"a layer of {len(parts)} parts; expected {len(self._writes)}")
        for part, write in zip(parts, self._writes, strict=True):
            self._check(part, len(write.keys) * self._layout.segment_tokens)
        self._missing.discard(layer)
        self._copies.append(self._executor.submit(self._copy, layer, parts, last=not self._missing))

    def copied(self, timeout_s: float | None = 0.0) -> bool:
        """Is all that was put so far copied, after at most so many seconds (None: however long it takes)?"""
        return not wait(self._copies, timeout_s).not_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """After the last layer: is it committed, after at most so many seconds? False as well before the last layer."""
        return not self._missing and self.copied(timeout_s)

    @property
    def codes(self) -> list[bytes]:
        """What happened to each segment of each part so far, one `Code` each: RESERVED until it is COMMITTED, or
        EXPIRED where something went wrong."""
        return [bytes(write.codes) for write in self._writes]

    def abort(self) -> None:
        """Give back what is not committed. Idempotent; never raises."""
        self._missing.clear()
        self._copies.append(self._executor.submit(self._abort))

    def _check(self, part: LayerCache, tokens: int) -> None:
        layout = self._layout
        dims = (layout.key_dim,) if layout.latent else (layout.key_dim, layout.value_dim)
        for name, array, dim in zip(("keys", "values"), part, dims, strict=False):
            expected = (layout.kv_heads, tokens, dim)
            if array.shape != expected or array.dtype != stored_dtype(layout.dtype):
                raise LayoutRefused(
                    f"{name} of shape {array.shape} and type {array.dtype}; expected {expected} and "
                    f"{stored_dtype(layout.dtype)}"
                )

    # -- the copying thread

    def _copy(self, layer: int, parts: Sequence[LayerCache], *, last: bool) -> None:
        if self._failed:
            return
        try:
            for write, part in zip(self._writes, parts, strict=True):
                for index, slot in write.slots:
                    self._fill(slot, layer, part, index)
            if last:
                for write in self._writes:
                    write.commit()
        except Exception as error:
            log.warning("new cache could not be put into the pool: %s", error)
            self._abort()

    def _fill(self, slot: NDArray[Any], layer: int, part: LayerCache, index: int) -> None:
        """Segment `index` of a part."""
        size = self._layout.segment_tokens
        targets = self._slots.views(slot, layer)
        for target, source in zip(targets[: 1 if self._layout.latent else 2], part, strict=False):
            groups, heads = target.shape[:2]
            mine = source[:, index * size : (index + 1) * size]
            target[...] = mine.reshape(groups, heads, *mine.shape[1:])

    def _abort(self) -> None:
        self._failed = True
        for write in self._writes:
            write.abort()
            write.codes[:] = write.codes.replace(bytes([Code.RESERVED]), bytes([Code.EXPIRED]))
