"""Engines in processes forked from one that has imported vLLM: each takes 0.6 s of processor time and not 18 s."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import IO

from tokenlake_testing.engine_lines import ENVIRONMENT, Child, Engine, main

PRELOADED = "tests.engines.vllm.preloaded"


class _Forked:
    """A process that `multiprocessing` started, as `Engine` uses it."""

    def __init__(
        self, config: str, log: str, nice: int, environment: dict[str, str], prepare: Callable[[], None]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        commands, to_child = context.Pipe(duplex=False)
        from_child, replies = context.Pipe(duplex=False)
        arguments = (config, log, nice, environment, commands, replies, prepare)
        # A daemon of `multiprocessing` must not have children, which the ranks of an engine are.
        self._process = context.Process(target=_run, args=arguments, daemon=not environment)
        before = dict(os.environ)
        # The fork server reads the environment when it starts, with the first engine.
        os.environ.update(ENVIRONMENT)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.stdin: IO[str] | None = os.fdopen(os.dup(to_child.fileno()), "w")
        self.stdout: IO[str] | None = os.fdopen(os.dup(from_child.fileno()))
        for end in (commands, to_child, from_child, replies):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self._process.exitcode


class ForkedEngine(Engine):
    """As `Engine`. The processes that it starts, with `VLLM_ENABLE_V1_MULTIPROCESSING` in its environment, are forked,
    too."""

    @staticmethod
    def prepare() -> None:
        """Called in the process before the engine starts."""

    def _start(self, config: str, python: str, nice: int, environment: dict[str, str]) -> Child:
        return _Forked(config, str(self.log), nice, environment, self.prepare)


class ForeignBackend(ForkedEngine):
    """An engine with an attention backend whose memory layout the client does not know."""

    @staticmethod
    def prepare() -> None:
        from tokenlake_client.engines.vllm.known.blocks import BLOCK_VIEWS

        BLOCK_VIEWS.clear()


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Greedy tokens of each prompt, twice; the engine's own cache is reset in between. Ends the engine. Raises
    `Unreachable` when the engine did not start, or ended."""
    try:
        first = engine.generate(prompts)
        engine.call("forget")
        return [first, engine.generate(prompts)]
    finally:
        engine.close()


def refusals(engine: Engine) -> list[str]:
    """The reasons in the log why the pool is not used, one per line of the log."""
    return re.findall(r"served without the pool: ([^\n]*)", engine.log.read_text())


def _run(
    config: str,
    log: str,
    nice: int,
    environment: dict[str, str],
    commands: Connection,
    replies: Connection,
    prepare: Callable[[], None],
) -> None:
    os.nice(nice)
    os.environ.update(environment)
    context = multiprocessing.get_context
    # vLLM spawns processes on CPUs, each of which would import vLLM anew.
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(replies.fileno(), 1)
    os.dup2(output, 2)
    sys.stdin = os.fdopen(os.dup(commands.fileno()))
    from vllm.model_executor.models import registry

    # vLLM inspects a model's class in a new process, which imports vLLM: 8 s for each new class.
    registry._run_in_subprocess = lambda look: look()
    commands.close()
    replies.close()
    prepare()
    main(config)
