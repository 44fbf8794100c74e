"""The tokenizer of a model, and the text of a prompt at a token, for `tokenlake explain --prompt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tokenlake.wire.funnel import Funnel

SHOWN = 60
"""Maximum number of characters of a text that are shown."""


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model, from its tokenizer.json or the directory that has it. Raises `click.ClickException`
    where the file cannot be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise click.ClickException("--tokenizer needs the package: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises the class Exception itself where a file is not as expected.
        raise click.ClickException(f"{file} cannot be read: {error}") from error


class Prompt:
    """The text of a request, with the tokenizer of its model."""

    def __init__(self, text: Path, tokenizer: Path) -> None:
        """Raises `click.ClickException` where a file cannot be read."""
        self._tokenizer = load_tokenizer(tokenizer)
        try:
            self._text = text.read_text()
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{text} cannot be read: {error}") from error

    def place(self, funnel: Funnel) -> str:
        """A sentence with the characters of the segment at which the prompt of the request leaves what is known."""
        tokens = [self._tokenizer.encode(self._text, add_special_tokens=special) for special in (True, False)]
        encoded = min(tokens, key=lambda each: abs(len(each) - funnel.ideal))
        if abs(len(encoded) - funnel.ideal) >= funnel.segment_tokens or funnel.leaves_at is None:
            return (
                f"the text has {len(encoded):,} tokens, and the prompt had {funnel.ideal:,}: it is not the prompt as "
                "the chat template renders it, or the tokenizer is that of another model"
            )
        offsets = encoded.offsets[funnel.leaves_at : funnel.leaves_at + funnel.segment_tokens]
        first, end = offsets[0][0], offsets[-1][1]
        shown = self._text[first : min(end, first + SHOWN)]
        line = self._text.count("\n", 0, first) + 1
        return f"these are the characters {first:,} to {end - 1:,} of the text, in line {line:,}: {shown!r}"
