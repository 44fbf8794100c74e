"""The tokens of prompts, by the tokenizer and the chat template of the model, as engines apply them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenlake.errors import ConfigurationError, TokenLakeError

Message = Mapping[str, Any]


class Prompts:
    """The tokenizer in a directory, loaded when it is first used. Raises ConfigurationError where it is missing or
    cannot be loaded."""

    def __init__(self, directory: Path | None, chat_template: Path | None = None) -> None:
        self._directory = directory
        self._chat_template = chat_template
        self._loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        if self._directory is None:
            raise ConfigurationError("tokenizer", None, "the directory of the model's tokenizer; the log has text")
        try:
            import jinja2  # noqa: F401  transformers asks for it when it renders the first template
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenLakeError("the tokenizer needs transformers: pip install 'tokenlake-bench[convert]'") from None
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(self._directory), local_files_only=True)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigurationError(
                "tokenizer", str(self._directory), f"a directory of a tokenizer; {error}"
            ) from None
        if self._chat_template is not None:
            tokenizer.chat_template = self._chat_template.read_text()
        return tokenizer

    def render(self, body: Mapping[str, Any]) -> str:
        """The text of a chat: its messages and tools in the chat template, with what an engine takes from the body of a
        request. Raises ConfigurationError for a tokenizer without a template; ValueError for messages that the template
        refuses, or that have parts which are no text."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise ConfigurationError(
                "tokenizer", str(self._directory), "one with a chat template, or '--chat-template FILE'"
            )
        going_on = bool(body.get("continue_final_message"))
        extra = body.get("chat_template_kwargs")
        try:
            return str(
                tokenizer.apply_chat_template(
                    [_plain(message) for message in body["messages"]],
                    tools=body.get("tools") or None,
                    add_generation_prompt=bool(body.get("add_generation_prompt", not going_on)),
                    continue_final_message=going_on,
                    tokenize=False,
                    **(extra if isinstance(extra, dict) else {}),
                )
            )
        except Exception as error:  # A template is a program of the model's author: it raises what it likes.
            raise ValueError(
                f"messages: the chat template refuses them; {type(error).__name__}: {error!s:.100}"
            ) from None

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The token ids of each text. `special`: the tokenizer adds the special tokens at the ends; chat templates
        write their own."""
        if not texts:
            return []
        found = self._tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = found["input_ids"]
        return ids


def _plain(message: Message) -> dict[str, Any]:
    """A message as engines give it to a template: text parts as one text, and the arguments of tool calls parsed."""
    if not isinstance(message, Mapping):
        raise ValueError("expected objects")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(str(part["text"]) if isinstance(part, Mapping) else str(part) for part in content)
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_parsed(call) for call in calls]
    return plain


def _parsed(call: Any) -> Any:
    if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    return call
