"""`tokenlake serve` with one more flag, `--fault FILE`: while the file has the word `threads` no thread that sends or
receives segments can be started, and while it has the word `sinks` no instruction about segments' bytes is carried out.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import click

from tokenlake.core.instructions import CheckSlot, SendBulk, StartFetch
from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.loop.driver import Sink
from tokenlake_server.start.daemon import Daemon

BULK = ("send", "receive", "check")
"""How the names of these threads begin."""


@click.command()
@with_settings
@click.option("--fault", required=True, type=click.Path(path_type=Path))
def main(file: Path | None, fault: Path, **flags: object) -> None:
    """Run a daemon that fails while the file says so."""
    start = threading.Thread.start

    def starting(self: threading.Thread) -> None:
        if self.name.startswith(BULK) and has(fault, "threads"):
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = starting  # type: ignore[method-assign]
    run_daemon(file, flags, made=lambda daemon: break_sinks(daemon, fault))


def break_sinks(daemon: Daemon, fault: Path) -> None:
    """Let the functions that carry out instructions about bytes raise while the file has the word `sinks`."""

    def sink(carry_out: Sink) -> Sink:
        def failing(instruction: Any) -> None:
            if isinstance(instruction, StartFetch | SendBulk | CheckSlot) and has(fault, "sinks"):
                raise MemoryError
            carry_out(instruction)

        return failing

    daemon.driver.wrap(lambda handle: handle, sink)


def has(fault: Path, word: str) -> bool:
    """Does the file have this word now?"""
    return fault.exists() and word in fault.read_text()


if __name__ == "__main__":
    main()
