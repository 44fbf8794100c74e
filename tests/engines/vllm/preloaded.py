"""Imported by the fork server of `tests.engines.vllm.forked`: what each engine would import by itself."""

from __future__ import annotations

import gc
import importlib

__all__: list[str] = []

for name in (
    "vllm.entrypoints.llm",
    "vllm.lora.layers",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
    "tokenlake_client.engines.vllm.known.connector",
    "tokenlake_client.engines.vllm.offloading.connector",
    "tokenlake_testing.vllm_engine",
):
    importlib.import_module(name)

# vLLM collects garbage five times while it starts and twice at its end, which takes 3 s with all these modules.
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
