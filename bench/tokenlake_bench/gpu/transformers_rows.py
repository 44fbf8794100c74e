"""The check `transformers`: the engine on a GPU with a daemon beside it.

The model has the shape of Llama-3.1-8B, with random weights that are made on the device. Caches that came from the pool
are compared with computed ones bit for bit; tokens in float32 with a small model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenlake_bench.daemons import settle
from tokenlake_bench.gpu.base import CPU, Rig, Row, device_named
from tokenlake_client import Deadlines
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine
from tokenlake_client.engines.transformers.segment_copy import SegmentCopier
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.corrupting import corrupting
from tokenlake_testing.cpu_copier import CpuCopier
from tokenlake_testing.cpu_device import CpuDevice

PATIENT = Deadlines(call_s=10.0, match_s=10.0, fetch_s=60.0, store_s=30.0)
"""The check is about bytes and rates: a busy machine may not run a process for longer than the default deadlines."""
PATIENCE_S = 60.0
NEW = 12
"""Tokens of an answer in float32."""
SCALE = 12.0
"""Factor on the weights of the small model: its greedy tokens then depend on the whole context."""
LLAMA_8B: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
}


@dataclass(frozen=True)
class _Size:
    model: dict[str, int]
    lengths: tuple[int, ...]
    """Tokens of the prompts, the most important one first."""
    segment: int
    memory: tuple[str, str]
    """Of the engine's node, and of the other."""
    region: str


FULL = _Size(LLAMA_8B, (16384, 4096, 65536), 256, ("40GiB", "14GiB"), "1GiB")
"""128 KiB per token in bfloat16."""
SMALL = _Size(TINY, (96, 48), 16, ("64MiB", "64MiB"), "8MiB")


def transformers(rig: Rig) -> Iterator[Row]:
    """Tokens in float32; then, for each length, the time to the first token cold and with the prefix in the pool. On
    the device of tests a small model computes in host memory."""
    device_named(rig.device)
    size = SMALL if rig.small or rig.device == CPU else FULL
    with _cluster(size) as cluster:
        bench = _Bench(rig.device, size, cluster)
        yield bench.tokens()
        bench.load_model()
        for length in size.lengths:
            yield from bench.first_tokens(length)


def _cluster(size: _Size) -> Cluster:
    cluster = Cluster(2, size.memory[0], size.region)
    cluster.nodes[1].settings["memory"] = size.memory[1]
    return cluster


class _Pageable(CudaDevice):
    """A GPU for which no memory is locked."""

    def lock(self, address: int, nbytes: int, *, write: bool) -> Callable[[], None] | None:
        return None


class _Bench:
    def __init__(self, device: str, size: _Size, cluster: Cluster) -> None:
        self._device = torch.device(device)
        self._size = size
        self._cluster = cluster
        self._cuda = self._device.type == "cuda"
        self._cpu = CpuDevice()
        self._model: Any = None
        self._seed = 0

    def load_model(self) -> None:
        """Make the model whose times are measured."""
        self._model = self._build(self._size.model, torch.bfloat16 if self._cuda else torch.float32)

    def tokens(self) -> Row:
        """Greedy tokens in float32 of a small model: without the pool, cold, warm; and with corrupted segments, where
        they must differ."""
        model = self._build(TINY, torch.float32, SCALE)
        prompts = [self._prompt(model, 6 * SMALL.segment + extra) for extra in (1, 9)]

        def answers(engine: TokenLakeEngine) -> list[list[int]]:
            return [self._generate(model, engine, each, NEW) for each in prompts]

        with TokenLakeEngine(model, None) as plain:
            expected = answers(plain)
        with self._engine(model, SMALL.segment) as engine:
            cold = answers(engine)
            engine.flush(PATIENCE_S)
        with self._engine(model, SMALL.segment) as engine:
            warm = answers(engine)
            hits, failures = engine.counts.tokens_hit, engine.counts.failures
        with self._engine(model, SMALL.segment, copier=corrupting(self._copier())) as engine:
            corrupted = answers(engine)
        right = cold == warm == expected and corrupted != expected
        right &= hits == 12 * SMALL.segment and not failures
        figures = {"tokens_hit": float(hits), "corrupted_tokens_differ": float(corrupted != expected)}
        return Row("tokens in float32: without the pool, cold, warm, corrupted", right, figures)

    def first_tokens(self, length: int) -> Iterator[Row]:
        """Seconds to the first token. A prompt's cache from the pool is compared with the computed one."""
        prompt = self._prompt(self._model, length)
        with ExitStack() as stack:
            plain = stack.enter_context(TokenLakeEngine(self._model, None))
            if length == self._size.lengths[0]:
                # The first passes choose kernels and fill the memory pool of torch.
                self._first_token(plain, prompt)
            alone_s = self._first_token(plain, prompt)[0]
            storing = stack.enter_context(self._engine(self._model))
            cold_s, expected = self._first_token(storing, prompt)
            began = time.perf_counter()
            stored = storing.flush(PATIENCE_S) and storing.counts.tokens_not_stored == 0
            figures = {"ttft_s": cold_s, "without_pool_s": alone_s, "stored_s": time.perf_counter() - began}
            yield Row(f"{length} tokens, cold", stored and not storing.counts.failures, figures)
            ways: list[tuple[str, int, SegmentCopier]] = [
                ("on this node, page-locked", 0, self._copier()),
                ("on this node, pageable", 0, self._copier(locked=False)),
                ("on another daemon over loopback", 1, self._copier()),
            ]
            for name, node, copier in ways:
                with self._engine(self._model, node=node, copier=copier) as engine:
                    first_s, cache = self._first_token(engine, prompt)
                    hits = engine.counts.tokens_hit
                    right = hits == (length - 1) // self._size.segment * self._size.segment
                    right &= not engine.counts.failures and _same(cache, expected, hits)
                    del cache
                    again_s = self._first_token(engine, prompt)[0]
                # The first load also locks the arena. From another daemon it is the one that goes over the network.
                yield Row(
                    f"{length} tokens, {name}",
                    right,
                    {"first_s": first_s, "ttft_s": first_s if node else again_s, "again_s": again_s},
                )

    def _build(self, shape: dict[str, int], dtype: Any, scale: float = 1.0) -> Any:
        """A Llama model with random weights, made on the device."""
        config = LlamaConfig(
            **shape, max_position_embeddings=131072, pad_token_id=0, bos_token_id=1, eos_token_id=1, dtype=dtype
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        try:
            with torch.device(self._device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in model.parameters():
                if scale != 1.0 and parameter.ndim >= 2:
                    parameter.mul_(scale)
        return model.eval()

    def _engine(
        self, model: Any, segment: int | None = None, node: int = 0, copier: SegmentCopier | None = None
    ) -> TokenLakeEngine:
        options = EngineOptions(
            mode="fetch",
            segment_tokens=segment or self._size.segment,
            weights_digest=f"random {id(model)}",
            deadlines=PATIENT,
            write_patience=PATIENCE_S,
        )
        return TokenLakeEngine(model, self._cluster.nodes[node].socket, options, copier or self._copier())

    def _copier(self, *, locked: bool = True) -> SegmentCopier:
        if self._cuda:
            return SegmentCopier(CudaDevice if locked else _Pageable)
        if not locked:
            self._cpu.fail("lock")
        return CpuCopier(self._cpu)

    def _prompt(self, model: Any, length: int) -> list[int]:
        """Random tokens, others with every call."""
        self._seed += 1
        draw = np.random.default_rng(self._seed)
        tokens: list[int] = draw.integers(2, model.config.vocab_size, length).tolist()
        return tokens

    def _generate(self, model: Any, engine: TokenLakeEngine, prompt: list[int], new: int) -> list[int]:
        cache = engine.prefill(prompt).cache
        ids = torch.tensor([prompt], device=self._device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def _first_token(self, engine: TokenLakeEngine, prompt: list[int]) -> tuple[float, Any]:
        """Seconds until the first token of the answer, and the cache of the prompt."""
        self._synchronize()
        began = time.perf_counter()
        cache = engine.prefill(prompt).cache
        ids = torch.tensor([prompt], device=self._device)
        with torch.no_grad():
            logits = self._model(
                input_ids=ids[:, -1:],
                position_ids=torch.full((1, 1), len(prompt) - 1, device=self._device),
                past_key_values=cache,
                use_cache=True,
            ).logits
        int(logits[0, -1].argmax())
        return time.perf_counter() - began, cache

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        settle(self._cluster)


def _same(cache: Any, expected: Any, tokens: int) -> bool:
    """Whether the first `tokens` tokens of two caches are equal bit for bit."""
    return all(
        torch.equal(one[:, :, :tokens], other[:, :, :tokens])
        for layer, other_layer in zip(cache.layers, expected.layers, strict=True)
        for one, other in ((layer.keys, other_layer.keys), (layer.values, other_layer.values))
    )
