"""Child processes that the kernel kills when this process ends for any reason, SIGKILL included.

The kernel sends a child its parent-death signal when the *thread* that started it ends. Therefore one thread, which
lives as long as the process, starts all children. The child itself sets the signal, in `exec_bound.py`, after an exec:
`preexec_fn` runs Python between fork and exec, which may deadlock where the parent has threads.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenlake_testing import exec_bound

_EXEC_BOUND: Final = Path(exec_bound.__file__)
_starter: Final = ThreadPoolExecutor(1, thread_name_prefix="start-child")


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen(command, **options)`, but the child does not outlive this process. The process id is the
    command's own. Takes some 20 ms longer. Raises FileNotFoundError when there is no such program. Do not call it in a
    process that was forked after this process called it: the thread that starts children does not exist there."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"no such program: {command[0]!r}")
    start: partial[subprocess.Popen[Any]] = partial(subprocess.Popen, bound(command), **options)
    return _starter.submit(start).result()


def bound(command: Sequence[str]) -> list[str]:
    """The command that makes the kernel kill its process when the thread of this process that starts it ends, and then
    runs `command`."""
    # The options -I and -S leave out the environment and site-packages, which the script does not need; it then starts
    # in half the time.
    return [sys.executable, "-I", "-S", str(_EXEC_BOUND), str(os.getpid()), *command]


def end_with_parent() -> None:
    """As `start_child`, for a process of `multiprocessing`, which calls this at its start: the kernel kills the process
    when the thread that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise RuntimeError("not in a process that multiprocessing started")
    exec_bound.bind_to(parent.pid)
