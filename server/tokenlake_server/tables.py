"""Tables of the commands: with lines and colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table with every value whole. On a terminal a cell is folded between words. Where the output is a pipe or
    a file, or the terminal is too narrow for the longest words: one line per row, with columns of equal width."""
    listed = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        console, table = Console(), made_table(columns, listed, title)
        if table.columns_within(console.width) == len(columns):
            console.print(table)
            return
    if title:
        click.echo(printable(title))
    lines = [list(columns), *listed] if any(columns) else listed
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class FittedTable:
    """A table for a terminal of any width. Cells are folded between words only; where the longest words of all columns
    take more than the width, the last columns are left out. Columns of numbers are right-aligned."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
        self._columns = columns
        self._rows = rows
        self._title = title
        cells = [[column, *(row[at] for row in rows)] for at, column in enumerate(columns)]
        self._least = [max((cell_len(word) for cell in each for word in cell.split()), default=0) for each in cells]
        """The width of the longest word of each column."""
        self._most = [max(map(cell_len, each)) for each in cells]

    def columns_within(self, width: int) -> int:
        """The number of columns, from the left, for which a terminal of this width has room; at least one."""
        count = len(self._columns)
        while count > 1 and sum(self._least[:count]) > _room(width, count):
            count -= 1
        return count

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = self.columns_within(options.max_width)
        room = _room(options.max_width, count)
        pairs = list(zip(self._least[:count], self._most[:count], strict=True))

        def widths(level: int) -> list[int]:
            """As wide as the text, or as `level`, or as the longest word."""
            return [min(most, max(least, level)) for least, most in pairs]

        level = next((level for level in range(room, 0, -1) if sum(widths(level)) <= room), 0)
        table = Table(box=SIMPLE)
        for at, width in enumerate(widths(level)):
            numbers = bool(self._rows) and all(not row[at] or row[at][0].isdigit() for row in self._rows)
            justify = "right" if numbers else "left"
            table.add_column(escape(self._columns[at]), overflow="fold", justify=justify, width=width)  # type: ignore[arg-type]
        for row in self._rows:
            table.add_row(*map(escape, row[:count]))
        if self._title:
            yield Text(self._title, style="table.title")
        yield table


def made_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> FittedTable:
    """A table for a terminal."""
    return FittedTable(columns, [[printable(cell) for cell in row] for row in rows], printable(title))


def printable(text: str) -> str:
    """`text` with escapes in place of control characters: engines choose the names of requests, and a terminal would
    execute the sequences in them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _room(width: int, columns: int) -> int:
    """Characters for the cells of a table: beside them are a space on either side, and a line between two and at both
    ends."""
    return width - 3 * columns - 1
