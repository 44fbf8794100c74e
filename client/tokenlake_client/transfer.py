"""Storing new cache layer by layer, while the engine computes the next layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

from numpy.typing import NDArray

from tokenlake.attention import SlotMap, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.write import Write

log = logging.getLogger(__name__)

LayerCache = tuple[NDArray[Any], NDArray[Any]]
"""Keys [kv heads, tokens, key dim] and values [kv heads, tokens, value dim] of one layer of one part, with any strides,
in the layout's dtype (bfloat16 as uint16). `tokens` are those of the part's segments. The values are ignored in a
latent layout."""


class Transfer:
    """Slots for segments of several prompts, filled layer by layer in a thread of the pool, and committed when all
    layers are copied. The methods are for one thread."""

    def __init__(self, layout: Layout, writes: Sequence[Write], executor: Executor) -> None:
        """Made by `Pool.init_transfer`. Takes over the writes."""
        self._layout = layout
        self._slots = SlotMap.of(layout)
        self._writes = list(writes)
        self._executor = executor
        self._missing = set(range(layout.layers))
        self._copies: list[Future[None]] = []
        self._failed = False

    def put(self, layer: int, parts: Sequence[LayerCache]) -> None:
        """Copy one layer of every part in the background: the arrays must not change until `wait` or `copied` returns
        True. The last layer commits the segments.

        Raises `LayoutRefused` for arrays of a wrong shape or type, and for a layer that the layout does not have or
        that was put before. Errors of the pool are in `codes`.
        """
        if layer not in self._missing:
            left = ", ".join(map(str, sorted(self._missing))) or "none"
            raise LayoutRefused(f"layer {layer} was put before, or the layout has no such layer; still to come: {left}")
        if len(parts) != len(self._writes):
            raise LayoutRefused(f"a layer of {len(parts)} parts; expected {len(self._writes)}")
        for part, write in zip(parts, self._writes, strict=True):
            self._check(part, len(write.keys) * self._layout.segment_tokens)
        self._missing.discard(layer)
        last = not self._missing
        self._submit(lambda: self._copy(layer, parts, last=last))

    def copied(self, timeout_s: float | None = 0.0) -> bool:
        """Wait at most `timeout_s` (None: without limit) until all layers that were put are copied. Returns whether
        they are."""
        return not wait(self._copies, timeout_s).not_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` (None: without limit) until the segments are committed or have failed. Returns
        whether they are; False at once while a layer has not been put."""
        return not self._missing and self.copied(timeout_s)

    @property
    def codes(self) -> list[bytes]:
        """For each part (the segments of one prompt), one `Code` per segment: RESERVED until it is COMMITTED, or
        EXPIRED after an error."""
        return [bytes(write.codes) for write in self._writes]

    def abort(self) -> None:
        """Give the slots that are not committed back to the daemon. Idempotent; never raises."""
        self._missing.clear()
        self._submit(self._abort)

    def _submit(self, task: Callable[[], None]) -> None:
        """Run `task` in the thread that copies. Once the pool is closed that thread takes no task, and the segments
        have failed."""
        try:
            self._copies.append(self._executor.submit(task))
        except RuntimeError:
            # The executor still copies the layers that it accepted, and the daemon reuses slots at once that are given
            # back.
            wait(self._copies)
            self._abort()

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

    # -- in the thread that copies

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
            log.warning("new cache could not be stored: %s", error)
            self._abort()

    def _fill(self, slot: NDArray[Any], layer: int, part: LayerCache, index: int) -> None:
        """Copy one layer of segment `index` of a part (the keys and values of one prompt's segments) into the slot."""
        size = self._layout.segment_tokens
        targets = self._slots.views(slot, layer)
        for target, source in zip(targets[: 1 if self._layout.latent else 2], part, strict=False):
            groups, heads = target.shape[:2]
            tokens = source[:, index * size : (index + 1) * size]
            target[...] = tokens.reshape(groups, heads, *tokens.shape[1:])

    def _abort(self) -> None:
        self._failed = True
        for write in self._writes:
            write.expire()
