"""The demo's handle of an engine process: starts it and sends it requests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake_bench import demo_wire as wire
from tokenlake_testing.children import start_child

R = TypeVar("R")
STOP_S = 5.0
LOG_CHARACTERS = 2000


class EngineHandle:
    """The demo's handle of one engine process, whose output goes to `log`. It must be used by one thread at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        # Each engine computes with one thread, because two engines share the machine with the daemons.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as file:
            self._process = start_child(
                [sys.executable, "-m", "tokenlake_bench.demo_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def load(self, directory: Path | None, segment_tokens: int) -> wire.Loaded:
        """Make the engine load the model in `directory`, or the tiny model where it is None."""
        return self._call(wire.Load("" if directory is None else str(directory), segment_tokens), wire.Loaded)

    def attach(self, socket: Path, window: int, mode: Literal["fetch", "ship"] = "fetch") -> None:
        """Make the engine disconnect from its daemon, if it has one, and connect to the daemon whose local socket is
        `socket`."""
        self._call(wire.Attach(str(socket), window, mode), wire.Attached)

    def run(self, request: wire.Run, on_fetching: Callable[[int], None] = lambda remote: None) -> wire.Ran:
        """Make the engine serve one request and return its reply. `on_fetching(segments)` is called when the engine
        begins to read that number of segments from other nodes."""
        return self._call(request, wire.Ran, on_fetching)

    def finish(self) -> wire.EngineReport:
        """Wait until the engine has stored all its segments in the pool. Returns its measurements of the calls to the
        pool."""
        return self._call(wire.Finish(), wire.EngineReport)

    def close(self) -> None:
        """End the engine process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _call(
        self, request: wire.Message, expected: type[R], on_fetching: Callable[[int], None] = lambda remote: None
    ) -> R:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            wire.write_message(self._process.stdin, request)  # type: ignore[arg-type]
            reply = wire.read_message(self._process.stdout)  # type: ignore[arg-type]
            while isinstance(reply, wire.Fetching):
                on_fetching(reply.remote)
                reply = wire.read_message(self._process.stdout)  # type: ignore[arg-type]
        except Unreachable:
            self._process.kill()
            tail = self._log.read_text(errors="replace")[-LOG_CHARACTERS:].strip()
            raise TokenLakeError(f"an engine process ended: {tail or 'it printed nothing'}") from None
        assert isinstance(reply, expected)
        return reply
