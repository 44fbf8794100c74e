"""A chat as vLLM gives it to the chat template of a model: for a tokenizer in the router's process.

vLLM changes the messages of a request before it renders them: arguments of tool calls become mappings, parts of text
are joined unless the template loops over the parts of a content, and tools have the fields of its own types. What this
module does not know is left to vLLM (`/tokenize`): a chat that is rendered in another way has other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenlake.errors import TokenLakeError

ROLES = ("system", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
BILLING_HEADER = "x-anthropic-billing-header"
"""vLLM drops a line that begins like this from a system message."""
MAX_TEMPLATES = 32
PROBE = "tokenlake probe"
"""A text that no template has."""


class NotRendered(TokenLakeError):
    """A chat with something that only vLLM knows how to render; the message names it."""


def messages_for_template(messages: Sequence[Mapping[str, Any]], parts: bool) -> list[dict[str, Any]]:
    """The messages as vLLM gives them to a template. `parts`: `takes_parts` of the template. Raises `NotRendered`."""
    return [_message(each, parts) for each in messages]


def _message(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise NotRendered(f"a message of the role {str(role)[:32]!r}")
    texts = list(_texts(message.get("content")))
    if role == "system" and any(each["text"].lower().startswith(BILLING_HEADER) for each in texts):
        raise NotRendered("a system message with a header line")
    joined = "\n".join(each["text"] for each in texts)
    found: dict[str, Any] = {"role": role, "content": texts if parts and role != "tool" else joined}
    if role == "assistant":
        if message.get("tool_calls"):
            found["tool_calls"] = [_call(each) for each in message["tool_calls"]]
        if message.get("reasoning") is not None:
            found["reasoning"] = found["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    found |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    return found


def _texts(content: object) -> Iterator[dict[str, Any]]:
    """The parts of a content, each with its text."""
    if content is None:
        return
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield {"type": "text", "text": part}
        elif isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            yield {**part, "type": "text"}
        else:
            raise NotRendered("a content with parts that are no text")


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise NotRendered("a tool call that is no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}


def tools_for_template(tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as vLLM gives them to a template: with the fields of its own types, in their order. Raises
    `NotRendered`."""
    if tools is None:
        return None
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise NotRendered("a tool that is no function")
        fields = {name: function.get(name) for name in ("name", "description", "parameters")}
        fields |= {name: function[name] for name in ("strict",) if function.get(name) is not None}
        if (deferred := function.get("defer_loading", tool.get("defer_loading"))) is not None:
            fields["defer_loading"] = deferred
        found.append({"type": "function", "function": fields})
        if tool.get("defer_loading") is not None:
            found[-1]["defer_loading"] = tool["defer_loading"]
    return found


@lru_cache(maxsize=MAX_TEMPLATES)
def takes_parts(template: str) -> bool:
    """True if a chat template loops over the parts of a content, so that vLLM gives it contents as lists of parts:
    rendered with a list, it gives the texts of the parts, and neither the list itself nor an error."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    content = [{"type": "text", "text": PROBE}]
    messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
    try:
        text = _compile_jinja_template(template).render(messages=messages, bos_token="", eos_token="")
    except Exception:  # of the template, such as a list that is added to a text
        return False
    return PROBE in text and "[{" not in text.partition(PROBE)[0]
