"""The messages of a version that adds a field at the end of every message, and of every struct in a message."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

MODULES = (
    "tokenlake.hints",
    "tokenlake.wire.funnel",
    "tokenlake.wire.engine",
    "tokenlake.wire.peer",
    "tokenlake.wire.query",
    "tokenlake.wire.supervision",
)
"""The modules that declare messages; a module comes after those that it imports."""
ADDED = "of the next version"
"""Default of the field `added`."""


@contextlib.contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """The modules of the next version by name, each as its source with one field more. Modules that are first imported
    within the context use these."""
    before = {name: sys.modules.get(name) for name in MODULES}
    try:
        yield {name: _install(name) for name in MODULES}
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                _set(name, module)


def _install(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        tree = ast.parse(file.read())
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_") and _is_message(each):
            each.body += ast.parse(f"added: str = {ADDED!r}").body
    module = importlib.util.module_from_spec(spec)
    _set(name, module)
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    return module


def _is_message(declared: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in declared.bases}
    return bool(bases & {"_Message", "_Struct", "msgspec.Struct"})


def _set(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[parent], child, module)
