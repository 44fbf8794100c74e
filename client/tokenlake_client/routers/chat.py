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
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else [content]:
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
    """True if a chat template loops over the parts of a content, so that vLLM gives it contents as lists of parts."""
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)

    def plain(node: object) -> object:
        """The node without filters, tests and slices."""
        while isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        return node

    def is_of(node: object, name: str, field: str | None = None) -> bool:
        """True for the variable, or for its field."""
        node = plain(node)
        if field is not None:
            if isinstance(node, nodes.Getattr):
                found: object = node.attr
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                found = node.arg.value
            else:
                return False
            if found != field:
                return False
            node = node.node
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name

    lists = ["messages"]
    for name in lists:  # grows while it is read
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in lists and is_of(assign.node, name):
                lists.append(target.name)
    loops = list(tree.find_all(nodes.For))
    named = [(loop, loop.target.name) for loop in loops if isinstance(loop.target, nodes.Name)]
    messages = [name for loop, name in named if any(is_of(loop.iter, each) for each in lists)]
    in_macros: dict[int, set[str]] = {}
    """By loop in a macro, the parameters that are given the content of a message."""
    for macro in tree.find_all(nodes.Macro):
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            pairs = [(parameter.name, value) for parameter, value in zip(macro.args, call.args, strict=False)]
            pairs += [(each.key, each.value) for each in call.kwargs if isinstance(each, nodes.Keyword)]
            given |= {name for name, value in pairs if any(is_of(value, each, "content") for each in messages)}
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = given
    for loop in loops:
        if any(is_of(loop.iter, each, "content") for each in messages):
            return True
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}):
            return True
    return False
