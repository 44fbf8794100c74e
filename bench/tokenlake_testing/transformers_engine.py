"""A transformers model as an engine of tests. It runs in a process that `tokenlake_testing.engine_lines` starts, and
its methods are the commands that this process serves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


class TransformersEngine:
    """An engine of transformers in this process. Its public methods are the commands that the process serves."""

    def __init__(self, model: str, pool: dict[str, Any] | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tokenlake_client.engines.transformers import TokenLakeEngine

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._engine = None if pool is None else TokenLakeEngine(self._model, pool["socket"])

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None,
        adapter: str | None = None,
        params: Any = None,
        image: Any = None,
    ) -> dict[str, Any]:
        """The fields of `Timed` but the seconds. Only prompts and tokens count."""
        import torch

        generate: Any = self._model.generate if self._engine is None else self._engine.generate
        rows = []
        for prompt in prompts:
            output = generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
            rows.append(output[0, len(prompt) :].tolist())
        return {"tokens": rows, "cached": 0}

    def forget(self) -> bool:
        return True

    def flush(self) -> bool:
        return self._engine is None or self._engine.flush(20)

    def counts(self) -> dict[str, float]:
        if self._engine is None:
            return {}
        counts = asdict(self._engine.counts)
        return counts | {"hook_seconds": counts["pool_seconds"]}

    def clocks(self) -> dict[str, list[float]]:
        return {}

    def layout(self) -> str:
        assert self._engine is not None
        assert self._engine.layout is not None
        return self._engine.layout.encode().hex()

    def hook_ms(self, tokens: int) -> float | None:
        return None
