"""Chats as vLLM gives them to a template. The expected values are those of vLLM 0.32."""

from __future__ import annotations

from typing import Any

import pytest

from tokenlake_client.routers.chat import NotRendered, messages_for_template, takes_parts, tools_for_template

LOOP = "{% for m in messages %}{{ m.role }}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (LOOP + "{{ m.content }}" + END, False),
        (LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}" + END, True),
        (LOOP + "{% for part in m['content'] | list %}{{ part.text }}{% endfor %}" + END, True),
        (LOOP + "{% set content = m.content %}{% for part in content %}{{ part.text }}{% endfor %}" + END, True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{{ p }}{% endfor %}" + END, True),
        (
            "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            + LOOP
            + "{{ show(m.content) }}"
            + END,
            True,
        ),
        (
            "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            + LOOP
            + "{{ show(m.tools) }}"
            + END,
            False,
        ),
        (LOOP + "{% for call in m.tool_calls %}{{ call.name }}{% endfor %}" + END, False),
    ],
)
def test_templates_that_loop_over_parts(template: str, parts: bool) -> None:
    pytest.importorskip("transformers")
    assert takes_parts(template) is parts


TEXTS = [{"type": "text", "text": "a"}, "b"]


@pytest.mark.parametrize(
    ("message", "parts", "expected"),
    [
        ({"role": "user", "content": "a"}, False, {"content": "a"}),
        ({"role": "user", "content": "a"}, True, {"content": [{"type": "text", "text": "a"}]}),
        ({"role": "user", "content": TEXTS}, False, {"content": "a\nb"}),
        ({"role": "user", "content": TEXTS}, True, {"content": [TEXTS[0], {"type": "text", "text": "b"}]}),
        ({"role": "assistant", "content": None}, False, {"content": ""}),
        ({"role": "assistant", "content": None}, True, {"content": []}),
        ({"role": "tool", "content": TEXTS, "tool_call_id": "1"}, True, {"content": "a\nb", "tool_call_id": "1"}),
        ({"role": "user", "content": "a", "name": "n", "other": 1}, False, {"content": "a", "name": "n"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": []},
            False,
            {"content": "a", "reasoning": "r", "reasoning_content": "r"},
        ),
    ],
)
def test_a_message(message: dict[str, Any], parts: bool, expected: dict[str, Any]) -> None:
    assert messages_for_template([message], parts) == [{"role": message["role"], **expected}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("no json", {}), ("[1]", {})],
)
def test_the_arguments_of_a_call_are_a_mapping(arguments: object, expected: dict[str, Any]) -> None:
    """A wrong text in the history of a chat does not end the chat."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (found,) = messages_for_template([{"role": "assistant", "content": "", "tool_calls": [call]}], False)
    assert found["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]


def test_tools_have_the_fields_of_vllms_types() -> None:
    given = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "other": 1}}
    expected = {"name": "f", "description": None, "parameters": {"type": "object"}}
    found = (tools_for_template([given]) or [])[0]
    assert found == {"type": "function", "function": expected}
    assert list(found["function"]) == list(expected), "templates print them in this order"
    assert tools_for_template(None) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "system", "content": "x-anthropic-billing-header: 1\na"},
        {"role": "assistant", "tool_calls": ["a"]},
    ],
)
def test_what_only_vllm_renders(message: dict[str, Any]) -> None:
    with pytest.raises(NotRendered):
        messages_for_template([message], False)
