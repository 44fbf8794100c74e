"""Counts calls of the product's functions, in this process and in child processes.

A child counts from its start: `counted_children` puts a `sitecustomize` on the module path of the children, and
`Crossings.of_child` asks a child by SIGUSR1 for its counts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
RULES = ("tokenlake",)
PRODUCT = ("tokenlake", "server", "client", "query")
FILES = "COUNTED_CALLS"
"""The environment variable that names the folder of the children's counts."""
SITECUSTOMIZE = "from tests.house.crossings import count_from_start\n\ncount_from_start()\n"


class Crossings:
    """Calls of Python functions that are defined in some folders of the checkout. Comprehensions and lambdas are not
    counted as functions."""

    def __init__(self, folders: Sequence[str]) -> None:
        """`folders`: relative to the checkout."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls by file and qualified name."""
        self._folders = tuple(f"{ROOT / folder}{os.sep}" for folder in folders)

    def __enter__(self) -> Crossings:
        self.begin()
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def begin(self) -> None:
        """Count in this thread, and in those that start from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def per_request(self, requests: int) -> Crossings:
        """The share of one of `requests` equal requests. Functions that were called less often are left out: they ran
        on a timer."""
        each = Crossings(PRODUCT)
        each.calls = Counter({name: calls // requests for name, calls in self.calls.items() if calls >= requests})
        return each

    def __str__(self) -> str:
        modules = {name for name, _ in self.calls}
        return f"{sum(self.calls.values())} calls, {len(self.calls)} functions, {len(modules)} modules"

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._folders) and not code.co_name.startswith("<"):
            self.calls[code.co_filename, code.co_qualname] += 1


@contextlib.contextmanager
def counted_children() -> Iterator[Path]:
    """Python processes that are started meanwhile count their calls. Yields the folder of the counts."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as undo:
        Path(name, "sitecustomize.py").write_text(SITECUSTOMIZE)
        path = os.environ.get("PYTHONPATH")
        for variable, value in {FILES: name, "PYTHONPATH": os.pathsep.join([name, str(ROOT), path or ""])}.items():
            undo.callback(_restore, variable, os.environ.get(variable))
            os.environ[variable] = value
        yield Path(name)


def _restore(variable: str, value: str | None) -> None:
    os.environ.pop(variable)
    if value is not None:
        os.environ[variable] = value


def count_from_start() -> None:
    """Count all calls of this process. On SIGUSR1 it writes the counts since the last one into a file named by its
    process id."""
    crossings = Crossings(PRODUCT)
    file = Path(os.environ[FILES], str(os.getpid()))

    def write(number: int, frame: FrameType | None) -> None:
        counted, crossings.calls = crossings.calls, Counter()
        part = file.with_suffix(".part")
        part.write_bytes(pickle.dumps(dict(counted)))
        part.rename(file)

    signal.signal(signal.SIGUSR1, write)
    crossings.begin()


def counts_of_child(folder: Path, process: int) -> Crossings:
    """The calls of a child since the last time this was asked. `folder`: from `counted_children`."""
    from tests.robustness.live import wait_until

    file = folder / str(process)
    file.unlink(missing_ok=True)
    os.kill(process, signal.SIGUSR1)
    wait_until(file.exists, f"process {process} writes its counts")
    crossings = Crossings(PRODUCT)
    crossings.calls = Counter(pickle.loads(file.read_bytes()))
    return crossings
