"""Seconds of one forward pass: the slower of arithmetic and memory, for the layers' matrices and for attention, plus
the transfers of tensor parallelism and a constant per layer. The formulae with their sources: `docs/simulation.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tokenlake.errors import ConfigurationError
from tokenlake_bench.engine_model.gpus import Gpu
from tokenlake_bench.engine_model.layers import Attention
from tokenlake_bench.engine_model.models import CACHE_BYTES, Model

RESERVED: Final = 0.10
"""Share of a GPU's memory that holds neither weights nor KV cache; engines keep it free by default."""

MOST_WEIGHTS: Final = 2 / 3
"""Largest share of the memory (without `RESERVED`) that a model's weights may fill: `EngineModel.fitting` takes the
fewest GPUs with at most this share."""


class Chunk(NamedTuple):
    """Part of a prompt that one forward pass computes: `new` tokens, which attend to `cached` earlier ones and to each
    other."""

    new: int
    cached: int
    last: bool = True
    """True if the model samples a token after this part of a prompt."""


class EngineModel:
    """Durations of the forward passes (steps) of one instance: a model on `gpus` GPUs with tensor parallelism. Equal
    arguments give equal times. Raises ConfigurationError where the weights leave no room for a cache."""

    def __init__(self, model: Model, gpu: Gpu, gpus: int = 1) -> None:
        if gpus < 1 or gpus & (gpus - 1):
            raise ConfigurationError("tensor_parallel", gpus, "a power of two")
        self.model = model
        self.gpu = gpu
        self.gpus = gpus
        fp8 = gpu.fp8_flops * gpu.fp8_efficiency
        self._matrix_flops = gpus * (fp8 if model.fp8 else gpu.flops * gpu.compute_efficiency)
        self._attention_flops = gpus * gpu.flops * gpu.compute_efficiency
        self._memory_rate = gpus * gpu.memory_rate * gpu.memory_efficiency
        self._fixed_s = gpu.layer_s * (model.layers + (gpu.mixture_factor - 1) * model.mixture_layers)
        self._cache_bytes = model.cache_bytes_on(gpus)
        self._attention = [
            (count, part, CACHE_BYTES * count * part.cache_elements * part.copies(gpus))
            for count, part in model.attention
        ]
        if self.cache_tokens < 1:
            raise ConfigurationError(
                "tensor_parallel",
                gpus,
                f"more GPUs: the weights of {model.name} take {model.stored_bytes / 1e9:.0f} GB, and {gpus} {gpu.name} "
                f"have {self._memory / 1e9:.0f} GB for weights and cache",
            )

    @classmethod
    def fitting(cls, model: Model, gpu: Gpu) -> EngineModel:
        """An instance of the model on the fewest GPUs whose free memory the weights fill to at most two thirds."""
        gpus = 1
        while model.stored_bytes > gpus * gpu.memory_bytes * (1 - RESERVED) * MOST_WEIGHTS:
            gpus *= 2
        return cls(model, gpu, gpus)

    @property
    def cache_tokens(self) -> int:
        """Number of tokens whose cache fits into the memory of the instance's GPUs beside the weights."""
        return int((self._memory - self.model.stored_bytes) / self._cache_bytes)

    @property
    def _memory(self) -> float:
        """Bytes of the GPUs for weights and cache."""
        return self.gpus * self.gpu.memory_bytes * (1 - RESERVED)

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        """Seconds of one forward pass over `chunks`, which are parts of prompts, and in the same batch over one token
        of each of `decoding` requests, which attend to `context` cached tokens in sum.

        Returns 0 for an empty batch.
        """
        tokens = sum(chunk.new for chunk in chunks) + decoding
        if not tokens:
            return 0.0
        sampled = sum(chunk.last for chunk in chunks) + decoding
        matrices = self._matrices_s(tokens, sampled)
        return matrices + self._attention_s(chunks, decoding, context) + self._reduce_s(tokens) + self._fixed_s

    def prefill_s(self, new: int, cached: int = 0) -> float:
        """Seconds of a prefill of `new` tokens behind `cached` ones, computed in one forward pass without other
        requests."""
        return self.step_s((Chunk(new, cached),), 0, 0)

    def decode_s(self, decoding: int, context: int) -> float:
        """Seconds of one decode step of `decoding` requests that attend to `context` cached tokens in sum."""
        return self.step_s((), decoding, context)

    def network_rate(self, *, nvlink: bool = False) -> float:
        """Bytes per second between two instances, in one direction: over the network adapters of all GPUs of an
        instance, or over their NVLinks."""
        gpu = self.gpu
        rate = gpu.link_rate * gpu.link_efficiency if nvlink else gpu.network_rate * gpu.network_efficiency
        return self.gpus * rate

    def host_copy_s(self, tokens: int) -> float:
        """Seconds in which the KV cache of `tokens` tokens is copied between the memory of the host and that of the
        instance's GPUs, in either direction. Each GPU has a link of its own and copies its part."""
        return tokens * self._cache_bytes / (self.gpus * self.gpu.host_rate * self.gpu.host_efficiency)

    def _matrices_s(self, tokens: int, sampled: int) -> float:
        model = self.model
        flops = 2.0 * (tokens * model.active_parameters + sampled * model.output_parameters)
        return max(flops / self._matrix_flops, model.bytes_read(tokens) / self._memory_rate)

    def _attention_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        seconds = 0.0
        for new, cached, _ in chunks:
            flops = nbytes = 0.0
            for count, part, token_bytes in self._attention:
                flops += count * part.prefill_flops * pairs(new, cached, part)
                nbytes += token_bytes * min(cached + new, part.window + new if part.window else cached + new)
            seconds += max(flops / self._attention_flops, nbytes / self._memory_rate)
        if decoding:
            flops = nbytes = 0.0
            for count, part, token_bytes in self._attention:
                # Of requests of different lengths the mean counts.
                read = min(context, decoding * part.window) if part.window else context
                flops += count * part.decode_flops * read
                nbytes += token_bytes * read
            seconds += max(flops / self._attention_flops, nbytes / self._memory_rate)
        return seconds

    def _reduce_s(self, tokens: int) -> float:
        """Seconds of the two ring all-reduces of the hidden state in each layer. With t GPUs each all-reduce sends 2 (t
        - 1) / t of the state's bytes per GPU."""
        if self.gpus == 1:
            return 0.0
        nbytes = tokens * self.model.hidden * CACHE_BYTES * 2 * (self.gpus - 1) / self.gpus
        each = nbytes / (self.gpu.link_rate * self.gpu.link_efficiency) + self.gpu.reduce_s
        return 2 * self.model.layers * each


def pairs(new: int, cached: int, part: Attention) -> float:
    """Pairs of a new token and a token that it attends to: the cached tokens, the new ones before it and itself, or
    the last of these that are within the window."""
    growing = new if not part.window else min(new, max(0, part.window - cached))
    return growing * cached + growing * (growing + 1) / 2 + (new - growing) * part.window
