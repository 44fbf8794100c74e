"""Measures a model's forward passes and describes them as an engine would report them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self


class Pass(NamedTuple):
    """One forward pass of the model, or the mean of several."""

    rows: float
    tokens: float
    """Number of new tokens of each request in the batch."""
    cached: float
    """Number of cached tokens of each request in the batch, which precede the new ones."""
    seconds: float


class PassClock:
    """A context manager during which all forward passes of `model` are timed and recorded in `passes`."""

    def __init__(self, model: Any) -> None:
        self.passes: list[Pass] = []
        self._model = model
        self._hooks: list[Any] = []
        self._began: tuple[int, int, int, float] = (0, 0, 0, 0.0)

    def __enter__(self) -> Self:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, positional: Any, named: dict[str, Any]) -> None:
        rows, tokens = named["input_ids"].shape
        cache = named.get("past_key_values")
        self._began = rows, tokens, 0 if cache is None else cache.get_seq_length(), time.perf_counter()

    def _after(self, model: Any, positional: Any, output: Any) -> None:
        rows, tokens, cached, began = self._began
        self.passes.append(Pass(rows, tokens, cached, time.perf_counter() - began))


def mean_pass(passes: Sequence[Pass]) -> Pass | None:
    """The mean of these forward passes; None if there are none."""
    if not passes:
        return None
    return Pass(*(sum(column) / len(passes) for column in zip(*passes, strict=True)))
