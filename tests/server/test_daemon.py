"""The life of a daemon: a signal while it starts ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.robustness.live import LIMIT_S
from tokenlake.config import load_config
from tokenlake_server.daemon import run


def test_a_signal_while_memory_is_populated(tmp_path: Path) -> None:
    """The daemon populated all of its memory first, which took most of a minute with 64 GiB."""
    text = f'memory = "256MiB"\nsocket = "{tmp_path / "s"}"\nlisten = "127.0.0.1:0"\nmetrics = ""\n'
    config = load_config(toml_text=text, environ={}, flags={}, uid=os.getuid()).config
    reports: list[tuple[int, int]] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int) -> None:
            """Runs in the thread that populates."""
            if not reports:
                os.kill(os.getpid(), signal.SIGTERM)
            reports.append((done, total))
            # The loop handles the signal within one of these round trips.
            for _ in range(10):
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(LIMIT_S)

        await run(config, report, lambda daemon: reports.clear())

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(scene())
    finally:
        signal.signal(signal.SIGTERM, before)
    done, total = reports[-1]
    assert done < total == 256 << 20
    assert not (tmp_path / "s").exists()
