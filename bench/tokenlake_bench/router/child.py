"""An HTTP server as a child process, which ends with this process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenlake.errors import Unreachable
from tokenlake_testing.children import start_child

START_S = 300.0
"""Seconds within which a server must serve: vLLM's takes tens of seconds on an idle machine."""
STOP_S = 20.0


class HttpChild:
    """A child process that serves HTTP on a port of the loopback interface. `wait` returns when it serves; `close` ends
    it."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str],
        ready: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the server. `ready`: a path that it answers once it serves. `headers`: of all requests to it."""
        self.base = f"http://127.0.0.1:{port}"
        self.headers = dict(headers or {})
        self._log = log
        self._ready = ready
        with log.open("ab") as output:
            self._process = start_child(
                command, stdout=output, stderr=output, env=dict(environment), cwd=log.parent, start_new_session=True
            )

    def page(self, path: str) -> str:
        """The text of a page. Raises OSError."""
        request = urllib.request.Request(self.base + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.read().decode())

    def cpu_s(self) -> float:
        """Processor seconds of the server and of its processes that are alive."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                # proc(5), the fields behind the name: 3 is the session, which the server begins; 11 and 12 are times.
                if int(fields[3]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]

    def wait(self) -> None:
        """Wait until it serves. Raises `Unreachable` with the end of its log."""
        until = time.monotonic() + START_S
        while True:
            try:
                self.page(self._ready)
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise Unreachable(f"{self._log.stem} does not serve ({error}): {self.tail()}") from None
            time.sleep(0.2)

    def terminate(self) -> None:
        """Ask the server to end; `close` waits for its end."""
        self._process.terminate()

    def close(self) -> None:
        """End the server."""
        self.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
