"""An engine of the demo: a process with a model, one torch thread and a connection to its node's daemon.

Run as a module it is that process, which serves the calls of `Engine` (`tokenlake_bench.worker`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenlake_bench.worker import Worker, serve

FLUSH_S = 20.0
RUN_S = 300.0


@dataclass(frozen=True, slots=True)
class Ran:
    """One request: its tokens, the milliseconds to the first one and to the last. `hit_tokens`: copied from the
    daemon's memory; `shipped_tokens`: attended to where they lie, with `query_bytes` of queries and results."""

    tokens: list[int]
    ttft_ms: float
    took_ms: float
    hit_tokens: int = 0
    shipped_tokens: int = 0
    query_bytes: int = 0
    error: str = ""


class Engine:
    """Handle of an engine process, which it starts. Raises `Unreachable` when the process has ended."""

    def __init__(self) -> None:
        self._worker = Worker("tokenlake_bench.demo.engine", call_s=RUN_S)

    def load(self, model: Path | None, segment_tokens: int) -> dict[str, Any]:
        """Load a model, by default a tiny one of random weights. Returns its layout (hexadecimal) or the `problem` with
        it, the vocabulary and the positions."""
        loaded: dict[str, Any] = self._worker.call("load", model=str(model or ""), segment_tokens=segment_tokens)
        return loaded

    def attach(self, socket: Path, window: int, mode: str = "fetch", *, corrupt: bool = False) -> None:
        """Connect with a daemon. `corrupt`: bytes that come from the pool are changed."""
        self._worker.call("attach", socket=str(socket), window=window, mode=mode, corrupt=corrupt)

    def run(self, tokens: Sequence[int], new_tokens: int) -> Ran:
        """Serve a request with the cache of the daemon."""
        return Ran(**self._worker.call("run", tokens=list(tokens), new_tokens=new_tokens))

    def run_cold(self, tokens: Sequence[int], new_tokens: int) -> Ran:
        """Serve a request without a cache."""
        return Ran(**self._worker.call("run_cold", tokens=list(tokens), new_tokens=new_tokens))

    def flush(self) -> None:
        """Wait until the segments of all requests are stored."""
        self._worker.call("flush")

    def close(self) -> None:
        """End the process."""
        self._worker.close()


class _FirstToken:
    """A streamer for transformers' `generate` that records the time of the first generated token."""

    def __init__(self) -> None:
        self.at = 0.0
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Receives the prompt in the first call and one token in each later call of transformers."""
        if self._prompt_seen and not self.at:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Called by transformers after the last token."""


class _Process:
    """The engine in its process. Its public methods are the calls."""

    def __init__(self) -> None:
        import torch
        from transformers.utils import logging

        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._engine: Any = None

    def load(self, model: str, segment_tokens: int) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        from tokenlake.errors import LayoutRefused
        from tokenlake_client.engines.transformers import layout_of
        from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

        with tempfile.TemporaryDirectory(prefix="tokenlake-model-") as scratch:
            # Just large enough that a prefill of 1,024 tokens takes more than 100 ms on one CPU thread.
            directory = model or str(save_tiny_model(scratch, TinyModel(layers=3)))
            self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            try:
                self._layout = layout_of(self._model, segment_tokens=segment_tokens)
                found = {"layout": self._layout.encode().hex(), "problem": ""}
            except LayoutRefused as error:
                found = {"layout": "", "problem": str(error)}
        config = self._model.config
        positions = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        # The first forward pass also sets up torch.
        self._generate(self._model.generate, [0] * 64, 1)
        return {**found, "vocabulary": int(config.vocab_size), "positions": positions}

    def attach(self, socket: str, window: int, mode: Any, corrupt: bool) -> None:
        from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
        from tokenlake_client.engines.transformers.segment_copy import SegmentCopier
        from tokenlake_testing.corrupting import corrupting

        if self._engine is not None:
            self._engine.close()
        options = EngineOptions(
            segment_tokens=self._layout.segment_tokens,
            weights_digest=self._layout.weights_digest,
            window=window,
            mode=mode,
        )
        copier = corrupting(SegmentCopier()) if corrupt else None
        self._engine = TokenLakeEngine(self._model, socket, options, copier)

    def run(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        before = self._engine.counts
        try:
            ran = self._generate(self._engine.generate, tokens, new_tokens)
        except Exception as caught:
            return asdict(Ran([], 0.0, 0.0, error=f"{type(caught).__name__}: {caught}"))
        counts = self._engine.counts
        sent = counts.bytes_sent + counts.bytes_received - before.bytes_sent - before.bytes_received
        ran = replace(
            ran,
            hit_tokens=counts.tokens_hit - before.tokens_hit,
            shipped_tokens=counts.tokens_shipped - before.tokens_shipped,
            query_bytes=sent,
        )
        return asdict(ran)

    def run_cold(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        return asdict(self._generate(self._model.generate, tokens, new_tokens))

    def flush(self) -> None:
        self._engine.flush(FLUSH_S)

    def _generate(self, generate: Any, prompt: list[int], new_tokens: int) -> Ran:
        """Generate tokens greedily."""
        import torch

        first = _FirstToken()
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=first,
        )
        took_ms = (time.perf_counter() - began) * 1e3
        return Ran(output[0, len(prompt) :].tolist(), (first.at - began) * 1e3, took_ms)


if __name__ == "__main__":
    process = _Process()
    calls = (process.load, process.attach, process.run, process.run_cold, process.flush)
    serve({call.__name__: call for call in calls})
