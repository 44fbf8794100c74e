"""Tables of the commands: with lines and colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
from rich.box import SIMPLE
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

CUT = 8
"""A cut column of `PackedTables` has at least this width."""


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table with every value whole. On a terminal a cell is folded between words. Where the output is a pipe or
    a file, or the terminal is too narrow for the longest words: one line per row, with columns of equal width."""
    listed = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        console, table = Console(), FoldedTable(columns, listed, printable(title))
        if table.fits(console.width):
            console.print(table)
            return
    if title:
        click.echo(printable(title))
    lines = [list(columns), *listed] if any(columns) else listed
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class FoldedTable:
    """A table for a terminal that has room for the longest word of each column. Cells are folded between words only.
    Columns of numbers are right-aligned."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
        self._columns = columns
        self._rows = rows
        self._title = title
        cells = [[column, *(row[at] for row in rows)] for at, column in enumerate(columns)]
        self._least = [max((cell_len(word) for cell in each for word in cell.split()), default=0) for each in cells]
        """The width of the longest word of each column."""
        self._most = [max(map(cell_len, each)) for each in cells]

    def fits(self, width: int) -> bool:
        """Whether a terminal of this width has room for every word."""
        return sum(self._least) <= self._room(width)

    def _room(self, width: int) -> int:
        """Characters for cells: beside them are a space on either side, and a line between two and at both ends."""
        return width - 3 * len(self._columns) - 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = self._room(options.max_width)

        def widths(level: int) -> list[int]:
            """As wide as the text, or as `level`, or as the longest word."""
            return [min(most, max(least, level)) for least, most in zip(self._least, self._most, strict=True)]

        level = next((level for level in range(room, 0, -1) if sum(widths(level)) <= room), 0)
        table = Table(box=SIMPLE)
        for at, width in enumerate(widths(level)):
            justify = "right" if _numbers(row[at] for row in self._rows) else "left"
            table.add_column(escape(self._columns[at]), overflow="fold", justify=justify, width=width)  # type: ignore[arg-type]
        for row in self._rows:
            table.add_row(*map(escape, row))
        if self._title:
            yield Text(self._title, style="table.title")
        yield table


class PackedTables:
    """Tables that fill a screen of any size: one line per row. Columns for which the width has no room are left out,
    and the first of them is cut where it holds text. The tables share the lines of the screen; the title of a table
    that has more rows says how many."""

    def __init__(self, tables: Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]]) -> None:
        """`tables`: title, columns and rows of each."""
        self._tables = [
            (printable(title), [list(columns), *([printable(cell) for cell in row] for row in rows)])
            for title, columns, rows in tables
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        shares = self._rows_within(height)
        for at, ((title, lines), rows) in enumerate(zip(self._tables, shares, strict=True)):
            more = len(lines) - 1 - rows
            if at:
                yield Text()
            yield _line(f"{title} ({more:,} more)" if more else title, width, "bold")
            head, *shown = _packed(lines[: 1 + rows], width)
            yield _line(head, width, "dim")
            yield from (_line(each, width) for each in shown)

    def _rows_within(self, height: int) -> list[int]:
        """The number of rows of each table, one more for each in turn until the screen is full."""
        wanted = [len(lines) - 1 for _, lines in self._tables]
        given = [0] * len(wanted)
        left = height - 3 * len(wanted)  # a title and columns, and a blank line between two tables, or at the end
        while left > 0 and given != wanted:
            for at in range(len(wanted)):
                if left > 0 and given[at] < wanted[at]:
                    given[at] += 1
                    left -= 1
        return given


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _packed(lines: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of a table, columns of numbers right-aligned, with the columns that the width has room for."""
    packed = [""] * len(lines)
    for at in range(len(lines[0])):
        cells = [line[at] for line in lines]
        most, gap = max(map(cell_len, cells)), 2 * bool(at)
        room = width - max(map(cell_len, packed)) - gap
        numbers = _numbers(cells[1:])
        if at and room < most and (numbers or room < CUT):
            break
        size = min(most, room)
        for row, cell in enumerate(cells):
            fitted = set_cell_size(cell, size) if cell_len(cell) <= size else set_cell_size(cell, size - 1) + "…"
            packed[row] += " " * gap + (fitted if not numbers else fitted.strip().rjust(size))
        if size < most:
            break
    return packed


def printable(text: str) -> str:
    """`text` with escapes in place of control characters: engines choose the names of requests, and a terminal would
    execute the sequences in them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _numbers(cells: Iterable[str]) -> bool:
    return all(not cell or cell[0].isdigit() or cell == "-" for cell in cells)
