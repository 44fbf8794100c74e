"""Tables of the commands, on a terminal and in a pipe."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console
from rich.table import Table

__all__ = ["print_table"]

WIDE: Final = 10_000
"""Width in characters of a table that is not printed on a terminal."""


def print_table(table: Table) -> None:
    """Print the table with every value whole: folded to the width of a terminal, and in one line where the output is a
    pipe or a file."""
    for column in table.columns:
        column.overflow = "fold"
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)
