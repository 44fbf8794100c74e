"""Engines that live for one answer, each in a process forked from one that has imported vLLM already, so that each
starts in 3 s instead of 10."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenlake_testing.engine_lines import ENVIRONMENT

__all__ = ["Forked"]

ANSWER_S = 240.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Question:
    model: Path
    prompts: Sequence[Sequence[int]]
    tokens: int
    transfer: dict[str, Any] | None
    arguments: dict[str, Any]


class Forked:
    """Starts at once; `tokens` waits for the answer."""

    def __init__(
        self,
        model: Path,
        log: Path,
        prompts: Sequence[Sequence[int]],
        transfer: dict[str, Any] | None,
        tokens: int = 8,
        **arguments: Any,
    ) -> None:
        """`transfer`: vLLM's `KVTransferConfig`; None runs without a connector. `arguments`: of `vllm.LLM`."""
        self.log = log
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm.entrypoints.llm"])
        self._answer, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(Question(model, prompts, tokens, transfer, arguments), log, sender), daemon=True
        )
        before = dict(os.environ)
        # The fork server reads the environment when it starts, with the first engine.
        os.environ.update(ENVIRONMENT)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        sender.close()

    def tokens(self) -> list[list[list[int]]]:
        """Greedy tokens of each prompt, twice; the engine's own cache is reset in between. Raises `RuntimeError` when
        the engine did not start, or ended."""
        try:
            if not self._answer.poll(ANSWER_S):
                raise RuntimeError(f"no answer: {self.log.read_text()[-4000:]}")
            answer: list[list[list[int]]] = self._answer.recv()
            return answer
        except EOFError:
            raise RuntimeError(f"the engine ended: {self.log.read_text()[-4000:]}") from None
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
        self._answer.close()

    def refusals(self) -> list[str]:
        """The reasons in the log why the pool is not used, one per line of the log."""
        return re.findall(r"served without the pool: ([^\n]*)", self.log.read_text())


def _run(question: Question, log: Path, sender: Connection) -> None:
    os.nice(10)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.model_executor.models import registry

    # vLLM inspects a model's class in a new process, which imports vLLM: 8 s for each new class.
    registry._run_in_subprocess = lambda look: look()
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "seed": 0,
        "skip_tokenizer_init": True,
        **question.arguments,
    }
    if question.transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**question.transfer)
    engine = LLM(model=str(question.model), **settings)
    greedy = SamplingParams(temperature=0, max_tokens=question.tokens, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in question.prompts]
    answers = []
    for _ in range(2):
        answers.append([list(each.outputs[0].token_ids) for each in engine.generate(asked, greedy, use_tqdm=False)])
        engine.reset_prefix_cache()
    sender.send(answers)
