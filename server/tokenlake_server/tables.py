"""Tables of the commands: with lines and colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["made_table", "print_rows", "printable"]


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table with every value whole: folded to the width of a terminal; where the output is a pipe or a file,
    one line per row, with columns of equal width."""
    listed = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        Console().print(made_table(columns, listed, title))
        return
    if title:
        click.echo(printable(title))
    lines = [list(columns), *listed] if any(columns) else listed
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def made_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """A table for a terminal. Columns of numbers are right-aligned."""
    listed = [[printable(cell) for cell in row] for row in rows]
    table = Table(title=escape(printable(title)) or None, box=SIMPLE, title_justify="left")
    for at, column in enumerate(columns):
        numbers = bool(listed) and all(not row[at] or row[at][0].isdigit() for row in listed)
        table.add_column(column, overflow="fold", justify="right" if numbers else "left")
    for row in listed:
        table.add_row(*map(escape, row))
    return table


def printable(text: str) -> str:
    """`text` with escapes in place of control characters: engines choose the names of requests, and a terminal would
    execute the sequences in them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
