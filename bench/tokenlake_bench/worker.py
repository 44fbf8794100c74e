"""A child process that serves calls given as JSON lines, for a benchmark that started it: a load on a daemon during a
measurement, or the client of another store.

::

    {"call": NAME, "arguments": {...}}  ->  {"result": ...} or {"error": TEXT}

Other output of the process goes to its log. It ends when its standard input ends. The parent then kills its process
group, and so every process that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenlake.errors import Unreachable
from tokenlake_testing.children import start_child

STOP_S = 10.0


class Worker:
    """Handle of the child process, in the process that starts it."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        call_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process. `module`: run by `python -m`; it must call `serve`. `call_s`: deadline of one call.
        `environment`: variables that are added to those of this process."""
        self._module = module
        self._ended = False
        self._call_s = call_s
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-")
        self._log = Path(self._directory.name) / "log"
        with self._log.open("ab") as log:
            self._process = start_child(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                # The child gets a process group of its own, so that one signal ends it and the servers that it started.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()

    def call(self, name: str, **arguments: object) -> Any:
        """Call the function `name` in the process and return its result. Raises `Unreachable` with the error of the
        function, or with the last lines of the log when the process ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Unreachable(f"{self._module} ended: {self._log_end()}") from None
        answer = json.loads(self._line())
        if "error" in answer:
            raise Unreachable(f"{answer['error']}; its log: {self._log_end()}")
        return answer["result"]

    def close(self) -> None:
        """End the process and its process group, and wait until they are gone. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if not self._ended:
            self._ended = True
            # The group is killed before the process is reaped, because afterwards another group may have the same id.
            self._wait_for_exit()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._directory.cleanup()

    def _wait_for_exit(self) -> None:
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.01)

    def _line(self) -> bytes:
        line = bytearray()
        until = time.monotonic() + self._call_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._output], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Unreachable(f"{self._module} took more than {self._call_s:.0f} s: {self._log_end()}")
            data = os.read(self._output, 1 << 16)
            if not data:
                raise Unreachable(f"{self._module} ended: {self._log_end()}")
            line += data
        return bytes(line)

    def _log_end(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "empty"


def serve(calls: Mapping[str, Callable[..., object]]) -> None:
    """Serve calls in the child process until its standard input ends."""
    # Replies use a copy of the descriptor of standard output, because libraries print to standard output, which then
    # goes to the log.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply: dict[str, object] = {"result": calls[call["call"]](**call["arguments"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
