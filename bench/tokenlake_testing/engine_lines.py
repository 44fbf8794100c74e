"""One engine, vLLM, SGLang or transformers, in a process of its own that serves commands given as JSON lines: for
benchmarks and tests.

Run as a module it is that process; `Engine` is the handle in the process that starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from tokenlake.errors import Unreachable
from tokenlake_testing.children import start_child

MARK = "answer: "
STOP_S = 20.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment variables of an engine process: one thread, no further process, no compilation and no network access."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of one `generate` call."""

    tokens: list[list[int]]
    seconds: float
    cached: int
    """Prompt tokens that the engine did not compute, of all prompts together: from its own cache or a connector's."""
    params: list[Any] = field(default_factory=list)
    """The `kv_transfer_params` of each answer."""


class Child(Protocol):
    """The part of `subprocess.Popen` that `Engine` uses."""

    stdin: IO[str] | None
    stdout: IO[str] | None

    @property
    def pid(self) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Engine:
    """Handle of an engine process, which it starts at once. The process is ready when it sends its first reply."""

    def __init__(
        self,
        model: Path,
        log: Path,
        pool: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        kind: str = "vllm",
        python: str = sys.executable,
        nice: int = 0,
        environment: dict[str, str] | None = None,
        transfer: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """`pool`: the connector's settings; None: no connector; a list: several connectors within vLLM's
        `MultiConnector`. `python`: an interpreter that has the engine. `nice`: niceness of the process. `transfer`:
        further fields of vLLM's `KVTransferConfig`. `arguments`: arguments of `vllm.LLM`."""
        self.log = log
        config = {
            "kind": kind,
            "model": str(model),
            "pool": pool,
            "transfer": transfer or {},
            "arguments": arguments,
        }
        self.process = self._start(json.dumps(config), python, nice, environment or {})

    def _start(self, config: str, python: str, nice: int, environment: dict[str, str]) -> Child:
        with self.log.open("ab") as errors:
            return start_child(
                ["nice", "-n", str(nice), python, "-m", "tokenlake_testing.engine_lines", config],
                env={**os.environ, **ENVIRONMENT, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 8,
        salt: str | None = None,
        adapter: Path | None = None,
        image: tuple[int, str | None] | None = None,
    ) -> list[list[int]]:
        """Generate `tokens` tokens greedily for each prompt and return them; all prompts are given to the engine at
        once. `adapter`: directory of the LoRA adapter of these requests. `image`: the seed of an image that each prompt
        has, and the name that the client gives it."""
        return self.timed(prompts, tokens, salt, adapter, image).tokens

    def timed(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 8,
        salt: str | None = None,
        adapter: Path | None = None,
        image: tuple[int, str | None] | None = None,
        params: dict[str, Any] | list[Any] | None = None,
    ) -> Timed:
        """As `generate`, with the seconds that the engine took. With one new token that is the time to the first
        token. `params`: the `kv_transfer_params` of all requests, or a list with those of each."""
        lora = None if adapter is None else str(adapter)
        asked = {"prompts": prompts, "tokens": tokens, "salt": salt, "adapter": lora, "image": image, "params": params}
        return Timed(**self.call("generate", **asked))

    def call(self, command: str, **arguments: Any) -> Any:
        """Send one command to the engine process and return its reply. Raises Unreachable when the process has
        ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise Unreachable(f"the engine ended: {self.log.read_text()[-4000:]}")

    def close(self) -> None:
        """End the process by closing its input; a process that does not end then is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def main(arguments: str) -> None:
    """The main function of the engine process: start the engine that `arguments` (JSON) describe, then serve the
    commands on standard input until it ends. A command is a line of JSON with a method of the engine and its arguments;
    its answer is a line on standard output."""
    config = json.loads(arguments)
    engine: Any
    if config["kind"] == "vllm":
        from tokenlake_testing.vllm_engine import VllmEngine

        engine = VllmEngine(config["model"], config["pool"], config["transfer"], config["arguments"])
    elif config["kind"] == "sglang":
        from tokenlake_testing.sglang_engine import SGLangEngine

        engine = SGLangEngine(config["model"], config["pool"], config["arguments"])
    else:
        from tokenlake_testing.transformers_engine import TransformersEngine

        engine = TransformersEngine(config["model"], config["pool"])
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        started = time.perf_counter()
        answer = getattr(engine, command)(**request)
        if command == "generate":
            answer["seconds"] = time.perf_counter() - started
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
