"""The prompts that an operator names: as tokens, as text with the tokenizer of the model, or a file with many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from tokenlake_operator.prompt_text import load_tokenizer
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.tables import printable

MAX_PROMPTS = 4096
"""Limit of the prompts of one command."""
MAX_DIGITS = 10
"""Limit of the digits of a token id."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Prompts(NamedTuple):
    """The prompts of a command, by name, and what changes their keys beside the tokens."""

    tokens: dict[str, list[int]]
    layout: str
    adapter: str | None
    salt: str | None
    request_salt: str | None

    def messages(self, layouts: Sequence[pb.Layout]) -> tuple[pb.Layout, dict[str, pb.Prompt]]:
        """The layout that the command means, and its prompts as messages. `layouts`: those of the tenant's engines.
        Raises `click.ClickException`."""
        layout = self._layout(layouts)
        found = {}
        for name, tokens in self.tokens.items():
            found[name] = pb.Prompt(
                token_ids=np.asarray(tokens, "<u4").tobytes(),
                fingerprint=layout.fingerprint,
                adapter=self.adapter,
                salt=self.salt,
                request_salt=self.request_salt,
            )
        return layout, found

    def _layout(self, layouts: Sequence[pb.Layout]) -> pb.Layout:
        known = {each.fingerprint: each for each in layouts if not each.opaque}
        chosen = [
            each
            for each in known.values()
            if each.model_id == self.layout or each.fingerprint.hex().startswith(self.layout)
        ]
        if len(chosen) == 1:
            return chosen[0]
        listed = ", ".join(f"{each.fingerprint.hex()[:12]} ({printable(each.model_id)})" for each in known.values())
        if not known:
            opaque = "; those that have have opaque layouts, whose keys do not follow from tokens" if layouts else ""
            raise click.ClickException(f"no engine of this tenant has connected to the node{opaque}")
        raise click.ClickException(f"--layout names {len(chosen)} layouts; expected one of {listed}")


def with_prompts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name prompts to a command, as its argument `prompts`; None without any."""

    @wraps(command)
    def run(
        tokens: tuple[str, ...],
        texts: tuple[Path, ...],
        files: tuple[Path, ...],
        tokenizer: Path | None,
        rendered: bool,
        layout: str,
        adapter: str | None,
        salt: str | None,
        request_salt: str | None,
        **given: Any,
    ) -> Any:
        found: dict[str, list[int]] = {}
        encode = _encoder(tokenizer, rendered)
        for number, each in enumerate(tokens):
            found[f"tokens {number + 1}" if len(tokens) > 1 else "tokens"] = _numbers(each)
        for path in texts:
            found[str(path)] = encode(_text(path))
        for path in files:
            found |= _lines(path, encode)
        if len(found) > MAX_PROMPTS:
            raise click.UsageError(f"{len(found)} prompts; the limit of a command is {MAX_PROMPTS}")
        prompts = Prompts(found, layout, adapter, salt, request_salt) if found else None
        return command(prompts=prompts, **given)

    options = [
        click.option("--tokens", multiple=True, help="Token ids of a prompt, separated by commas or spaces."),
        click.option("--text", "texts", type=_FILE, multiple=True, help="File with the text of a prompt."),
        click.option(
            "--prompts",
            "files",
            type=_FILE,
            multiple=True,
            help='File with a JSON object on each line: {"tokens": [...]} or {"text": "..."}.',
        ),
        click.option(
            "--tokenizer",
            type=click.Path(exists=True, path_type=Path),
            help="The model's tokenizer.json, or the directory that has it; for texts.",
        ),
        click.option("--rendered", is_flag=True, help="Texts have their special tokens already: add none."),
        click.option(
            "--layout", default="", help="Model or beginning of the fingerprint of the layout, where there are several."
        ),
        click.option("--adapter", help="Digest of the LoRA adapter of the requests."),
        click.option("--salt", help="Salt of the engines (their setting `salt`)."),
        click.option("--request-salt", help="Salt of the requests (vLLM: `cache_salt`)."),
    ]
    wrapped: Callable[..., Any] = run
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _encoder(tokenizer: Path | None, rendered: bool) -> Callable[[str], list[int]]:
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)

    def encode(text: str) -> list[int]:
        if loaded is None:
            raise click.UsageError("texts need --tokenizer")
        ids: list[int] = loaded.encode(text, add_special_tokens=not rendered).ids
        return ids

    return encode


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read as text in UTF-8: {error}") from error


def _numbers(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip("[] \n"))
    if not all(word.isdecimal() and len(word) <= MAX_DIGITS and _is_token(int(word)) for word in words):
        raise click.UsageError(f"--tokens is {text[:40]!r}; expected token ids, separated by commas or spaces")
    return [int(word) for word in words]


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _lines(path: Path, encode: Callable[[str], list[int]]) -> Iterator[tuple[str, list[int]]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            made = json.loads(line)
        except (ValueError, RecursionError):
            made = None
        text, ids = (made.get("text"), made.get("tokens")) if isinstance(made, dict) else (None, None)
        if isinstance(text, str):
            yield where, encode(text)
        elif isinstance(ids, list) and ids and all(map(_is_token, ids)):
            yield where, ids
        else:
            raise click.UsageError(f'{where}: expected {{"tokens": [...]}} or {{"text": "..."}}')
