"""Shows the progress of a run on standard error: a bar on a terminal, elsewhere a line per tenth of the run."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINES = 10


class LiveProgress:
    """A progress bar as a context manager. `update` takes the finished part of `total` and a status text to show."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        """`console`: default standard error."""
        self._console = console = console or Console(stderr=True)
        self._title = title
        self._total = total
        self._lines = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, done: int, status: str) -> None:
        """Show that `done` of `total` is finished; `done` must never decrease."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, status=status)
        elif done * LINES // self._total > self._lines:
            self._lines = done * LINES // self._total
            line = f"{self._title}: {done} of {self._total}"
            self._console.print(f"{line}, {status}" if status else line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line that stays on the terminal, above the progress bar."""
        self._console.print(text, soft_wrap=True)
