"""One vLLM engine in a process of its own, driven by lines of JSON. Run as a module; `Engine` is its other end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Engine"]

MARK = "answer: "
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Engine:
    """Starts at once, is ready when the first answer comes."""

    def __init__(self, model: Path, log: Path, pool: dict[str, Any] | None = None, **arguments: Any) -> None:
        """`pool`: the connector's settings; None runs without it. `arguments`: of `vllm.LLM`."""
        self.log = log
        environment = {**os.environ, **ENVIRONMENT, **arguments.pop("environment", {})}
        config = {"model": str(model), "pool": pool, "arguments": arguments}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                # The ranks of one engine spin while they wait for each other; the daemon must run beside them.
                ["nice", "-n", "10", sys.executable, "-m", "tests.engines.vllm.engine_process", json.dumps(config)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int = 8, salt: str | None = None) -> list[list[int]]:
        """Greedy tokens of each prompt; all prompts are given at once."""
        answer: list[list[int]] = self.call("generate", prompts=prompts, tokens=tokens, salt=salt)
        return answer

    def call(self, command: str, **arguments: Any) -> Any:
        """The answer to one command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the engine ended: {self.log.read_text()[-4000:]}")

    def close(self) -> None:
        """End it, in order if it can."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    """The engine's process."""
    config = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "seed": 0,
        "skip_tokenizer_init": True,
        **config["arguments"],
    }
    if config["pool"] is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TokenLakeConnector",
            kv_connector_module_path="tokenlake_client.engines.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=config["pool"],
        )
    llm = LLM(model=config["model"], **arguments)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _answer(llm, request, SamplingParams)
        print(MARK + json.dumps(answer), flush=True)


def _answer(llm: Any, request: dict[str, Any], sampling: Any) -> Any:
    match request["command"]:
        case "generate":
            greedy = sampling(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
            extra = {} if request["salt"] is None else {"cache_salt": request["salt"]}
            prompts = [{"prompt_token_ids": tokens, **extra} for tokens in request["prompts"]]
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]
        case "forget":
            return llm.reset_prefix_cache()
        case "flush":
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            return get_kv_transfer_group().flush(20)
        case "layout":
            return llm.llm_engine.engine_core.engine_core.scheduler.connector.layout.encode().hex()
        case "counts":
            return _counts(llm)
    raise ValueError(request)


def _counts(llm: Any) -> dict[str, float]:
    """Sums over the scheduler's side and the rank in this process."""
    from dataclasses import asdict

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sides = [llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]
    total: dict[str, float] = {}
    for side in sides:
        for name, value in asdict(side.counts).items():
            total[name] = total.get(name, 0) + value
    return total


if __name__ == "__main__":
    main()
