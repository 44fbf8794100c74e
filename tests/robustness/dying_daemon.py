"""`tokenlake serve` with one more flag, `--die-at PHASE`: the daemon kills itself (SIGKILL) in that phase of taking
memory over, or of leaving it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.kept.keeper_process import KeeperProcess
from tokenlake_server.kept.ledger_file import LedgerFile
from tokenlake_server.kept.memory import Kept
from tokenlake_server.loop.driver import Driver

PHASES: dict[str, tuple[type, str, bool]] = {
    "connected with the keeper": (KeeperProcess, "__init__", True),
    "ledger adopted": (LedgerFile, "adopt", True),
    "regions adopted": (Kept, "_take_regions", True),
    "locks adopted": (Kept, "_take_locks", True),
    "before the take-over": (LedgerFile, "take_over", False),
    "taken over": (LedgerFile, "take_over", True),
    "first segments": (Kept, "_pass_in", True),
    "all told": (Kept, "begin", True),
    "all checked": (Kept, "_done", True),
    "a survivor is back": (Kept, "returned", True),
    "end begins": (Kept, "stop", False),
    "before the seal": (Kept, "hand_over", False),
    "first record of the seal": (Kept, "record", True),
    "sealed": (Kept, "sealed", True),
    "left": (Kept, "close", False),
    "a region is made": (Kept, "region_made", True),
    "a region is cut": (Kept, "region_cut", True),
    "a lock is made": (Kept, "lock_made", True),
}
"""By name of the phase: the method at which the daemon dies, and whether behind it or before it."""
AT_THE_END = ("end begins", "before the seal", "first record of the seal", "sealed", "left")


def dying(inner: Callable[..., Any], *, behind: bool, armed: Callable[[], bool]) -> Callable[..., Any]:
    """The function, in which the process kills itself."""

    def call(*arguments: Any, **named: Any) -> Any:
        found = inner(*arguments, **named) if behind or not armed() else None
        if armed():
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return call


@click.command()
@with_settings
@click.option("--die-at", required=True, type=click.Choice(list(PHASES)))
def main(file: Path | None, die_at: str, **flags: object) -> None:
    """Run a daemon that dies."""
    owner, name, behind = PHASES[die_at]
    ends = False

    def armed() -> bool:
        # Records are written all the time: those of the seal are meant.
        return ends or die_at != "first record of the seal"

    handle = Driver.handle

    def handling(self: Driver, event: Any) -> None:
        nonlocal ends
        ends = ends or type(event).__name__ == "SealRequested"
        handle(self, event)

    Driver.handle = handling  # type: ignore[method-assign]
    inner = vars(owner)[name]
    if isinstance(inner, classmethod):
        setattr(owner, name, classmethod(dying(inner.__func__, behind=behind, armed=armed)))
    else:
        setattr(owner, name, dying(inner, behind=behind, armed=armed))
    run_daemon(file, flags)


if __name__ == "__main__":
    main()
