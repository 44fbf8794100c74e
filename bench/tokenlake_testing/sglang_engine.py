"""SGLang in the process of `engine_lines`, which its scheduler's process shares nothing with."""

from __future__ import annotations

import asyncio
from typing import Any

BEGUN = "begun"
"""The name of the request of `begin`."""
POLL_S = 0.005
ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 8192,
    "page_size": 64,
    "log_level": "info",
    "random_seed": 0,
}
"""An engine on the CPU with torch's kernels."""
STORAGE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}
"""A host tier of twice the device's tokens. Its pages are stored as soon as they are computed, and loaded before a
request runs."""


class SGLangEngine:
    """One SGLang engine; its methods are the commands of `engine_lines`."""

    def __init__(self, model: str, pool: dict[str, Any] | None, arguments: dict[str, Any]) -> None:
        """`pool`: the JSON of `--hicache-storage-backend-extra-config`, or with a `backend` the name of one of SGLang's
        own; None: no host tier. `arguments`: further arguments of SGLang's `Engine`."""
        import json

        from sglang.srt.entrypoints.engine import Engine

        storage: dict[str, Any] = {}
        if pool is not None:
            own = dict(pool)
            storage = {
                **STORAGE,
                "hicache_storage_backend": own.pop("backend", "dynamic"),
                "hicache_storage_backend_extra_config": json.dumps(own),
            }
        self._engine = Engine(model_path=model, **{**ARGUMENTS, **storage, **arguments})
        self._begun: Any = None

    def generate(
        self, prompts: list[list[int]], tokens: int, salt: str | None = None, **ignored: object
    ) -> dict[str, Any]:
        """Greedy tokens of each prompt, all given at once."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        more = {} if salt is None else {"cache_salt": [salt] * len(prompts)}
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        return {
            "tokens": [answer["output_ids"] for answer in answers],
            "cached": sum(answer["meta_info"]["cached_tokens"] for answer in answers),
        }

    def begin(self, prompt: list[int]) -> None:
        """Give the engine a request, and do not wait for its answer."""

        async def ask() -> None:
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answers = await self._engine.async_generate(
                input_ids=prompt, sampling_params=sampling, rid=BEGUN, stream=True
            )
            async for _ in answers:
                pass

        async def until_known() -> None:
            while BEGUN not in self._engine.tokenizer_manager.rid_to_state and not self._begun.done():
                await asyncio.sleep(POLL_S)

        self._begun = self._engine.loop.create_task(ask())
        self._engine.loop.run_until_complete(until_known())

    def abort(self) -> None:
        """Abort the request of `begin`."""
        self._engine.tokenizer_manager.abort_request(BEGUN)
        self._engine.loop.run_until_complete(self._begun)

    def forget(self) -> bool:
        """Empty SGLang's own cache, on the device and on the host."""
        return bool(self._engine.flush_cache().success)

    def update(self, model: str, flush: bool = True) -> bool:
        """Load other weights in place."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        asked = UpdateWeightFromDiskReqInput(model_path=model, flush_cache=flush)
        done, *_ = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.update_weights_from_disk(asked, None)
        )
        return bool(done)

    def metrics(self) -> str:
        """SGLang's metrics page, of an engine with `enable_metrics`."""
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return str(generate_latest(registry).decode())
