"""Tables, units and files of results, for all commands.

Rates and shares are fractions from 0 to 1 in JSON and percentages in tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH: Final = 78
"""Characters within which a title stays on one line."""
NAME: Final = 54
"""Characters within which the name of a row does."""
REDIRECTED: Final = 240
"""Characters of a line where output goes to a file or a pipe."""


def output() -> Console:
    """Standard output; a table that goes to a file or a pipe keeps its width."""
    console = Console()
    return console if console.is_terminal else Console(width=REDIRECTED)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str | Text]], caption: str | None = None) -> Table:
    """A table for a terminal: names on the left, which stay whole unless they are sentences, and figures flush right.
    Without a `head` it has no header, and the rows have two cells."""
    shown = list(rows)
    names = max((len(row[0]) for row in shown), default=0)
    made = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        show_header=bool(head),
        min_width=min(WIDTH, max(map(len, title.split("\n")))),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, name in enumerate(head or ("", "")):
        whole = not number and names <= NAME
        word = max(map(len, name.split()), default=0)
        made.add_column(name, justify="right" if number else "left", no_wrap=whole, overflow="fold", min_width=word)
    for row in shown:
        made.add_row(*row)
    return made


def verdict(text: str, *, good: bool) -> Text:
    """A text in green, or in bold red where it is not good."""
    return Text(text, style="green" if good else "bold red")


def write_json(result: object, path: Path | None) -> None:
    """Write a result, a struct or a container of structs, as JSON indented by two. None writes nothing."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def format_bytes(count: float) -> str:
    """Text of a number of bytes in binary units with three significant digits: 1536 -> '1.50 KiB'."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 999.5 or unit == "TiB":
            break
    return f"{_three_digits(count)} {unit}"


def format_duration(seconds: float) -> str:
    """A duration with a unit that suits it: '250 us', '1.50 ms', '2.00 s', '3 min 5 s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_share(share: float) -> str:
    """Text of a fraction as a percentage with one decimal."""
    return f"{share * 100:.1f} %"


def format_ratio(ratio: float | None) -> str:
    """Text of a number with three decimals; a dash for None."""
    return "-" if ratio is None else f"{ratio:.3f}"


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
