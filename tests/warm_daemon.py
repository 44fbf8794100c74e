"""Imported by the fork server of the tests' daemons: what each daemon would import by itself.

The query engines of these daemons are forked, too, from a process that has imported torch. They are not children of
their daemons: `engine_of` finds them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenlake_server.cli  # noqa: F401
from tests.query.scene import query_engine_file
from tokenlake_server.engines import query_engine
from tokenlake_testing.children import bound
from tokenlake_testing.fork_server import ForkedProcess, ForkServer, fork

__all__: list[str] = []

for name in ("uvloop", "tokenlake_server.control.server", "tokenlake_server.membership.etcd"):
    # Extras, without which a daemon runs, too.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)


def _start_bound(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """As `start_child`, without its thread: the only thread of this process does not end before the process."""
    return subprocess.Popen(bound(command), **options)


_query_engines = ForkServer("tests.warm_query_engine", _start_bound)
_control = _query_engines.control


def _fork_query_engine(command: Sequence[str], pass_fds: Sequence[int]) -> ForkedProcess:
    """As `subprocess.Popen`, in a daemon."""
    _, _, module, *arguments = command
    process = fork(_control, module, arguments, {number: number for number in (1, 2, *pass_fds)}, os.environ)
    socket = Path(sys.argv[1 + sys.argv.index("--socket")])
    query_engine_file(socket).write_text(f"{process.pid}\n")
    return process


vars(query_engine)["subprocess"] = SimpleNamespace(Popen=_fork_query_engine, TimeoutExpired=subprocess.TimeoutExpired)
