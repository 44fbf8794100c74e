"""Docstrings and comments drawn at random: `python -m tests.house.prose_sample COUNT SEED [--places]`.

For the check that prose can be understood by itself: a reader explains each text, and another reader, who sees the
code at the printed place, decides whether the explanation is right.
"""

from __future__ import annotations

import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.structure import PACKAGES, ROOT, python_files

MIN_WORDS = 6
"""Shorter texts, such as "See `EvictionPolicy`.", say too little to be explained."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and each block of comment lines in a module."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# -- ", "# fmt")):
            if block and token.start[0] == last + 1:
                block.append(token.string.removeprefix("# "))
            else:
                if block:
                    yield first, " ".join(block)
                block, first = [token.string.removeprefix("# ")], token.start[0]
            last = token.start[0]
    if block:
        yield first, " ".join(block)


def draw(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` (place, text), drawn without replacement from all packages but the tests."""
    folders = [ROOT / folder for name, folder in PACKAGES.items() if name not in ("tests", "tokenlake/core")]
    found = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for folder in folders
        for path in python_files(folder)
        for line, text in texts(path)
        if len(text.split()) >= MIN_WORDS
    ]
    return random.Random(seed).sample(found, count)


if __name__ == "__main__":
    for number, (place, text) in enumerate(draw(int(sys.argv[1]), int(sys.argv[2])), 1):
        print(f"## {number}{' ' + place if '--places' in sys.argv else ''}\n{text}\n")
