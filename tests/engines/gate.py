"""A gate at which the leases of engines in other processes stop: the tests close it, and learn that one waits.

::

    match --> answer: the segments are leased   | ANSWER |   what the engine does with it
    fetch of leased segments                    | LOAD   |   the transfer, and the copies
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANSWER, LOAD = "answer", "load"
VARIABLE = "GATE_OF_THE_TESTS"
"""The variable of the environment that names the gate's directory to an engine's process."""
LIMIT_S = 120.0
POLL_S = 0.002


class Gate:
    """The files of one gate: a file with a point's name closes it there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which an engine's process finds the gate."""
        return {VARIABLE: str(self.directory)}

    def close(self, point: str) -> None:
        """From now on, engines wait at this point."""
        (self.directory / point).touch()

    def open(self) -> None:
        """Let all of them go on."""
        for path in self.directory.iterdir():
            path.unlink()

    def await_arrival(self, point: str) -> None:
        """Wait until an engine waits at this point."""
        _until((self.directory / f"{point} reached").exists, f"no engine came to the gate's point {point!r}")

    def passed(self, point: str) -> None:
        """Called by an engine at this point: waits while the gate is closed there."""
        closed = self.directory / point
        if closed.exists():
            (self.directory / f"{point} reached").touch()
            _until(lambda: not closed.exists(), "the gate was not opened")


def install(directory: str | None = None) -> None:
    """Let the leases of this process stop at the gate, in the directory that the environment names by default."""
    from tokenlake_client.lease import Lease
    from tokenlake_client.pool import Pool

    gate = Gate(Path(directory or os.environ[VARIABLE]))
    _replace(Pool, "match", lambda call: _then(call, lambda: gate.passed(ANSWER)))
    _replace(Lease, "fetch", lambda call: _first(lambda: gate.passed(LOAD), call))


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _then(call: Any, wait: Callable[[], None]) -> Any:
    def waits(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        wait()
        return result

    return waits


def _first(wait: Callable[[], None], call: Any) -> Any:
    def waits(*args: Any, **kwargs: Any) -> Any:
        wait()
        return call(*args, **kwargs)

    return waits


def _until(reached: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < until, what
        time.sleep(POLL_S)
