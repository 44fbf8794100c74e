"""An engine of the demo: a process with a model, one torch thread and a connection to its node's daemon."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any, BinaryIO, cast

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tokenlake.errors import LayoutRefused, Unreachable
from tokenlake.layout import Layout
from tokenlake_bench import demo_wire as wire
from tokenlake_bench.measured_pool import MeasuredPool, Watch
from tokenlake_client import Pool
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
from tokenlake_testing.tiny_model import TinyModel, save_tiny_model

TINY = TinyModel(layers=3)
"""Dimensions of the demo's model: just large enough that a prefill of 1,024 tokens takes more than 100 ms on one CPU
thread."""
PREFILL_TOKENS = 1024
FLUSH_S = 20.0


class FirstToken:
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
        """Called by transformers after the last token; does nothing."""


class EngineProcess:
    """The engine of one process: handles the messages of `demo_wire`, one at a time."""

    def __init__(self, answer: BinaryIO) -> None:
        self._answer = answer
        self._watch = Watch()
        self._pool: Pool | None = None
        self._engine: TokenLakeEngine | None = None

    def handle(self, message: wire.Message) -> wire.Message:
        """Handle one request of the demo and return the reply to it."""
        match message:
            case wire.Load():
                return self._load(message)
            case wire.Attach():
                return self._attach(message)
            case wire.Run():
                return self._run(message)
            case wire.Finish():
                return self._finish()
        raise AssertionError(f"{type(message).__name__} is no request")

    def _load(self, message: wire.Load) -> wire.Loaded:
        with tempfile.TemporaryDirectory(prefix="tokenlake-model-") as scratch:
            directory = message.directory or str(save_tiny_model(scratch, TINY))
            self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            try:
                layout = layout_of(self._model, segment_tokens=message.segment_tokens)
                self._layout: Layout = layout
                encoded, problem = layout.encode(), ""
            except LayoutRefused as error:
                encoded, problem = b"", str(error)
        config = self._model.config
        vocabulary = int(config.vocab_size)
        positions = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        count = min(PREFILL_TOKENS, positions - 1)
        prompt = [number % vocabulary for number in range(count)]
        # The time of the cold prefill is taken in the last of three runs, because the first forward pass also sets up
        # torch.
        prefill_ms = [self._generate(self._model.generate, prompt, 1)[1] for _ in range(3)][-1]
        heads = int(getattr(config, "num_attention_heads", 0))
        return wire.Loaded(encoded, vocabulary, positions, heads, count, prefill_ms, problem)

    def _attach(self, message: wire.Attach) -> wire.Attached:
        if self._engine is not None and self._pool is not None:
            self._engine.close()
            self._pool.close()
        self._pool = Pool.connect(message.socket, self._layout)
        # In mode "ship" this process reads no segments from the pool, so there are no reads to measure.
        watched = self._pool if message.mode == "ship" else cast(Pool, MeasuredPool(self._pool, self._watch))
        options = EngineOptions(
            segment_tokens=self._layout.segment_tokens,
            weights_digest=self._layout.weights_digest,
            window=message.window,
            mode=message.mode,
        )
        self._engine = TokenLakeEngine(self._model, watched, options)
        return wire.Attached()

    def _run(self, message: wire.Run) -> wire.Ran:
        assert self._engine is not None
        watch, before = self._watch, self._engine.counts
        local, remote = watch.local, watch.remote
        watch.flip = message.flip
        watch.before_remote = self._announce if message.announce else None
        tokens, ttft_ms, error = list[int](), 0.0, ""
        try:
            tokens, ttft_ms = self._generate(self._engine.generate, message.tokens, message.new_tokens)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        if message.flip:
            self._engine.flush(FLUSH_S)
        cold = self._generate(self._model.generate, message.tokens, message.new_tokens) if message.cold else ([], 0.0)
        counts = self._engine.counts
        return wire.Ran(
            tokens=tokens,
            ttft_ms=ttft_ms,
            hit_tokens=counts.tokens_hit - before.tokens_hit,
            shipped_tokens=counts.tokens_shipped - before.tokens_shipped,
            queries_sent=counts.queries_sent - before.queries_sent,
            query_bytes=counts.bytes_sent + counts.bytes_received - before.bytes_sent - before.bytes_received,
            remote_segments=watch.remote - remote,
            read_segments=watch.remote + watch.local - remote - local,
            cold_tokens=cold[0],
            cold_ttft_ms=cold[1],
            error=error,
        )

    def _announce(self, remote: int) -> None:
        self._watch.before_remote = None
        wire.write_message(self._answer, wire.Fetching(remote))

    def _generate(self, generate: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        """Generate tokens greedily. Returns (new tokens, time to the first token in milliseconds)."""
        first = FirstToken()
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
        return output[0, len(prompt) :].tolist(), (first.at - began) * 1e3

    def _finish(self) -> wire.EngineReport:
        assert self._engine is not None
        self._engine.flush(FLUSH_S)
        watch = self._watch
        return wire.EngineReport(
            longest_s=watch.longest_s,
            failed_calls=watch.failed,
            recovered_at=watch.recovered_at,
            cut_by=dict(watch.cut_by),
        )


def main() -> None:
    """The main function of the engine process: handle requests from standard input until it ends. Output of libraries
    goes to standard error."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    process = EngineProcess(answer)
    try:
        while True:
            wire.write_message(answer, process.handle(wire.read_message(sys.stdin.buffer)))
    except Unreachable:
        # The process exits without waiting for threads of the client, which may still wait for a daemon that has ended.
        os._exit(0)


if __name__ == "__main__":
    main()
