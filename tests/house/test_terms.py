"""Identifiers, message fields, metrics and settings of the product use the terms of the field.

A name is split into its words (`former_owner`: former, owner), and no word may be one that was replaced.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import tokenlake_server.loop.watchdog  # noqa: F401  declares a metric
from tests.house.structure import PACKAGES, ROOT, python_files
from tokenlake.config import load_config
from tokenlake.metrics import Metric

REPLACED = {
    "home": "directory node",
    "homes": "directory nodes",
    "holder": "owner",
    "holders": "owners",
    "staged": "cached",
    "turn": "fan-out limit, or rotation",
    "turns": "fan-out limit",
    "rather": "redirect",
    "advice": "hints",
    "word": "hint",
    "words": "hints",
    "former": "previous",
    "past": "history",
    "worth": "retention value",
    "hands": "parallel copy",
    "books": "grants",
    "heart": "heartbeat",
    "asking": "client",
    "answering": "server",
    "claim": "in-flight marker",
    "claims": "in-flight markers",
    "claimed": "marked",
}
EXCEPTIONS = {
    ("home", "home"): "Path.home, the home directory of a user",
    ("turn", "turn"): "a turn of a conversation, an access record counts them",
    ("turn", "MAX_TURN"): "the same",
    ("turn", "_TURN_FROM"): "the same",
    ("words", "ATTENTION_WORDS"): "parts of the field names of a model's configuration",
    ("words", "words"): "the words that a setting accepts",
    ("word", "word"): "one of them",
}
"""(word, identifier): its other meaning."""
LONGEST_TEST = 60
"""Most characters of the name of a test; its docstring has room for a sentence."""


def words(name: str) -> Iterator[str]:
    """Lower-case words of an identifier in snake or camel case."""
    return (part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def replaced(name: str) -> list[str]:
    return [word for word in words(name) if word in REPLACED and (word, name) not in EXCEPTIONS]


def names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: classes, functions, parameters, variables, attributes and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("package", ["tokenlake", "server", "client", "query"])
def test_identifiers_use_the_terms(package: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name!r} has {word!r}; say {REPLACED[word]}"
        for path in python_files(ROOT / PACKAGES[package])
        for name in {path.stem, *names(ast.parse(path.read_text()))}
        for word in replaced(name)
    }
    assert not wrong


def test_metrics_and_settings_use_the_terms() -> None:
    settings = [name for name, *_ in load_config(toml_text=None, environ={}, flags={}, uid=0).describe()]
    assert settings
    assert not [name for name in (*settings, *(metric.name for metric in Metric.all())) if replaced(name)]


def test_names_of_tests_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(ROOT / "tests")
        for name in names(ast.parse(path.read_text()))
        if name.startswith("test_")
    ]
    assert found
    assert not [each for each in found if len(each.rpartition(" ")[2]) > LONGEST_TEST]


@pytest.mark.parametrize(
    ("name", "found"), [("former_owner", ["former"]), ("HomeNode", ["home"]), ("MAX_TURN", []), ("homework", [])]
)
def test_the_words_of_a_name_are_seen(name: str, found: list[str]) -> None:
    assert replaced(name) == found
