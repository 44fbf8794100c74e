"""The tree of errors drawn in the docstring is the tree of classes."""

from __future__ import annotations

import re

from tokenlake import errors
from tokenlake.errors import ConfigurationError, TokenLakeError

LINE = re.compile(r"^    (?P<branch>[| +-]*)(?P<name>[A-Z]\w+)(?:\s{2,}.*)?$")


def drawn() -> dict[str, str | None]:
    """Parent by class, as drawn; a level is four columns wide."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = LINE.match(line)
        if found:
            level = len(found["branch"]) // 4
            parents[found["name"]] = path[level - 1] if level else None
            path[level:] = [found["name"]]
    return parents


def real() -> dict[str, str | None]:
    parents: dict[str, str | None] = {TokenLakeError.__name__: None}
    found: list[type[TokenLakeError]] = [TokenLakeError]
    for error in found:
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__:
                parents[child.__name__] = error.__name__
                found.append(child)
    return parents


def test_the_docstring_draws_the_tree() -> None:
    assert drawn() == real()
    assert len(drawn()) > 5


def test_every_error_is_public_and_documented() -> None:
    assert set(errors.__all__) == set(real())
    for name in errors.__all__:
        assert getattr(errors, name).__doc__


def test_a_configuration_error_carries_its_parts() -> None:
    error = ConfigurationError("memory", "x", "a size")
    assert str(error) == "setting 'memory' is 'x'; expected a size"
    assert (error.field, error.value, error.expected) == ("memory", "x", "a size")
