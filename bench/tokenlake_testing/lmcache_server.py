"""LMCache's server: a peer of the pool in `tokenlake bench engine`, and with the pool behind it in tests.

One server process keeps the caches of all engines of this machine, which connect to it through vLLM's
`LMCacheMPConnector`. LMCache is installed in a directory of its own, which only the server and these engines have on
their path, and without its dependencies: some of those exclude vLLM's. The packages that it needs on a machine without
a GPU are in vLLM's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_testing.children import start_child
from tokenlake_testing.ports import free_port

LMCACHE: Final = Path(".lmcache")
"""Directory in which `make install-lmcache` installs LMCache."""
START_S: Final = 120.0
STOP_S: Final = 10.0
MAIN: Final = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def check_lmcache(directory: Path = LMCACHE) -> None:
    """Raises ConfigurationError unless LMCache is installed in `directory`."""
    if not (directory / "lmcache").is_dir():
        raise ConfigurationError(
            "against",
            "lmcache",
            f"LMCache in {directory}, which is not there; in the repository `make install-lmcache` installs it",
        )


class LMCacheServer:
    """A running server of LMCache that keeps at most `memory_mib` of memory for caches. A context manager: waits until
    the server answers, and ends it at the exit. The kernel ends it with this process."""

    def __init__(
        self,
        python: str,
        memory_mib: int,
        chunk_tokens: int = 256,
        directory: Path = LMCACHE,
        l2: dict[str, Any] | None = None,
    ) -> None:
        """`python`: an interpreter with vLLM. `chunk_tokens`: tokens of an object that the server stores. `l2`: the
        JSON of `--l2-adapter`."""
        self._python = python
        self._port, self._http_port = free_port(), free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-lmcache-")
        self._shared = f"tokenlake_{os.getpid()}_{self._port}"
        self._arguments = {
            "host": "127.0.0.1",
            "port": str(self._port),
            "http-host": "127.0.0.1",
            "http-port": str(self._http_port),
            "l1-size-gb": str(memory_mib / 1024),
            "chunk-size": str(chunk_tokens),
            "eviction-policy": "LRU",
            "max-workers": "2",
            "supported-transfer-mode": "engine_driven",
            "shm-name": self._shared,
        }
        if l2 is not None:
            self._arguments["l2-adapter"] = json.dumps(l2)
        self.log = Path(self._directory.name) / "log"
        self.environment: Final = {
            "PYTHONPATH": os.pathsep.join([str(directory.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "DO_NOT_TRACK": "1",
        }
        """Environment variables with which the server runs and an engine finds LMCache."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def transfer(self) -> dict[str, Any]:
        """The text of vLLM's `--kv-transfer-config`."""
        server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": server}

    def __enter__(self) -> LMCacheServer:
        flags = [word for name, value in self._arguments.items() for word in (f"--{name}", value)]
        command = [self._python, "-c", MAIN, "server", *flags, "--disable-observability", "--no-l1-use-lazy"]
        with self.log.open("wb") as log:
            environment = {**os.environ, **self.environment}
            self._process = start_child(command, stdout=log, stderr=log, env=environment)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/healthcheck", timeout=1) as reply,
            ):
                if reply.status == 200:
                    return
            time.sleep(0.1)
        raise Unreachable(f"LMCache's server does not answer: {self.log.read_text()[-4000:]}")

    def status(self) -> dict[str, Any]:
        """The server's page `/status`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status", timeout=STOP_S) as reply:
            status: dict[str, Any] = json.load(reply)
            return status

    def hide_memory(self) -> None:
        """Remove the name of the server's shared memory, once all engines have mapped it, so that the memory is freed
        when the processes end in any way."""
        with contextlib.suppress(FileNotFoundError):
            Path("/dev/shm", f"lmcache_l1_pool_{self._shared}").unlink()

    def close(self) -> None:
        """End the server and remove its log."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.hide_memory()
        self._directory.cleanup()
