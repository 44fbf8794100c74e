"""The text of a prompt at a token, for `tokenlake explain --prompt`."""

from __future__ import annotations

from pathlib import Path

import click

from tokenlake.wire.funnel import Funnel

SHOWN = 60
"""Maximum number of characters of a text that are shown."""


class Prompt:
    """The text of a request, with the tokenizer of its model."""

    def __init__(self, text: Path, tokenizer: Path) -> None:
        """Raises `click.ClickException` where a file cannot be read."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise click.ClickException("--tokenizer needs the package: pip install tokenizers") from None
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        try:
            self._text = text.read_text()
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises the class Exception itself where a file is not as expected.
            raise click.ClickException(f"{text} or {file} cannot be read: {error}") from error

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
