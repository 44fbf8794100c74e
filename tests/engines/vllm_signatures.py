"""The names of vLLM that the connector imports, extends or replaces, with their signatures, for each version of vLLM
that the connector serves.

`python -m tests.engines.vllm_signatures DIRECTORY` reads them from an unpacked wheel, or from `site-packages`, into
`vllm_signatures.json`. The source of vLLM is parsed and not imported: a wheel for GPUs can be read on any machine::

    pip download vllm==0.33.0 --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 -d wheel
    unzip -q wheel/*.whl '*.py' -d unpacked && python -m tests.engines.vllm_signatures unpacked
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from tokenlake_client.engines.vllm import patches

OURS = Path(patches.__file__).parent
STORED = Path(__file__).with_suffix(".json")
KINDS = ("abstractmethod", "classmethod", "property", "staticmethod", "cached_property")
FIELDS = ("NamedTuple", "dataclass")
PATCHES = (patches.VERSION, patches.ADAPTERS)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Signatures = dict[str, dict[str, str]]
"""For each name, as module:name: "()" and the signature with which it is called, "bases" and the names of its base
classes, and the signature of each of its methods, behind its decorators of `KINDS`."""


class Name(NamedTuple):
    """A class, a function or another value of a module of vLLM."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module, parsed."""
    return ast.parse(path.read_text())


def imports(module: ast.Module, within: str = "") -> dict[str, Name]:
    """What a module takes from modules of vLLM, also inside functions, by the name that it has in the module. `within`:
    the package to which relative imports refer."""
    found: dict[str, Name] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            source = f"{within}.{node.module}" if node.level == 1 else node.module or ""
            if source.split(".")[0] == "vllm":
                found |= {alias.asname or alias.name: Name(source, alias.name) for alias in node.names}
    return found


@functools.cache
def our_classes() -> dict[str, tuple[ast.ClassDef, dict[str, Name]]]:
    """The classes of the connector, and what their modules take from vLLM."""
    return {
        node.name: (node, imports(parsed(path)))
        for path in sorted(OURS.rglob("*.py"))
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }


def our_imports() -> set[Name]:
    """Everything that the connector takes from vLLM."""
    return {name for path in OURS.rglob("*.py") for name in imports(parsed(path)).values()}


def bases(node: ast.ClassDef) -> list[str]:
    """The names of the base classes of a class."""
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def methods(node: ast.ClassDef) -> dict[str, Function]:
    """The methods of a class, without those that it inherits."""
    return {each.name: each for each in node.body if isinstance(each, Function)}


def kind(function: Function) -> list[str]:
    """The decorators of a function that tell how it is called."""
    names = [node.id for node in function.decorator_list if isinstance(node, ast.Name)]
    return sorted(name for name in names if name in KINDS)


def signature(function: Function) -> str:
    """The parameters of a function without their types; each default is "0"."""
    arguments = ast.parse(f"lambda {ast.unparse(_untyped(function.args))}: 0", mode="eval").body
    return f"({ast.unparse(arguments)[len('lambda ') : -len(': 0')].strip() if function.args.args else ''})"


def _untyped(arguments: ast.arguments) -> ast.arguments:
    def bare(each: ast.arg | None) -> ast.arg | None:
        return None if each is None else ast.arg(each.arg)

    def all_bare(each: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(one.arg) for one in each]

    zero = ast.Constant(0)
    return ast.arguments(
        posonlyargs=all_bare(arguments.posonlyargs),
        args=all_bare(arguments.args),
        vararg=bare(arguments.vararg),
        kwonlyargs=all_bare(arguments.kwonlyargs),
        kw_defaults=[None if each is None else zero for each in arguments.kw_defaults],
        kwarg=bare(arguments.kwarg),
        defaults=[zero for _ in arguments.defaults],
    )


class Source:
    """The source of one version of vLLM."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the one that has the package `vllm`."""
        self._directory = directory
        version = re.search(r"version = '([0-9.]+)", (directory / "vllm" / "_version.py").read_text())
        assert version is not None
        self.version = version[1].rstrip(".")

    def signatures(self) -> Signatures:
        """The signatures of everything that the connector takes from vLLM, of the base classes of that, and of the
        methods that it replaces. A name that this version lacks is not in the result."""
        stored: Signatures = {}
        extended = {taken[base] for node, taken in our_classes().values() for base in bases(node) if base in taken}
        for name in sorted(our_imports() | extended):
            self._add(name, stored, whole=name in extended)
        for patch in PATCHES:
            found = self._find(Name(*patch.owner.split(":")))
            if found is not None and isinstance(found[1], ast.ClassDef) and patch.method in methods(found[1]):
                stored[patch.owner] = {patch.method: signature(methods(found[1])[patch.method])}
        return stored

    def _add(self, name: Name, stored: Signatures, *, whole: bool) -> None:
        """Store a name. `whole`: with the methods of the class, and with its base classes."""
        found = self._find(name)
        if found is None or str(name) in stored:
            return
        module, node = found
        entry = stored[str(name)] = {}
        if isinstance(node, Function):
            entry["()"] = signature(node)
        elif isinstance(node, ast.ClassDef):
            called = self._called(module, node)
            if called:
                entry["()"] = called
            if whole:
                known = [each for each in (self._defined(module, base) for base in bases(node)) if each is not None]
                entry["bases"] = " ".join(map(str, known))
                for each in known:
                    self._add(each, stored, whole=True)
                for method, function in methods(node).items():
                    if method == "__init__" or not method.startswith("_"):
                        entry[method] = " ".join([*kind(function), signature(function)])

    def _called(self, module: str, node: ast.ClassDef) -> str:
        """The signature with which a class is called, with "self"; empty where it is not known."""
        if "__init__" in methods(node):
            return signature(methods(node)["__init__"])
        marks = [ast.unparse(each).split("(")[0] for each in node.decorator_list] + bases(node)
        if not set(marks) & set(FIELDS):
            return ""
        own = [
            ast.unparse(each.target) + ("=0" if each.value is not None else "")
            for each in node.body
            if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
        ]
        return f"({', '.join(['self', *own])})"

    def _path(self, module: str) -> Path | None:
        path = self._directory.joinpath(*module.split("."))
        return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)

    def _imports(self, module: str) -> dict[str, Name]:
        path = self._path(module)
        assert path is not None
        within = module if path.name == "__init__.py" else module.rpartition(".")[0]
        return imports(parsed(path), within)

    def _defined(self, module: str, name: str) -> Name | None:
        """The place where a name of a module is defined; None where that is not vLLM."""
        found = self._find(self._imports(module).get(name, Name(module, name)))
        return None if found is None else Name(found[0], name)

    def _find(self, name: Name) -> tuple[str, ast.stmt] | None:
        """The module that defines a name, and its definition; None where vLLM lacks it."""
        path = self._path(name.module)
        if path is None:
            return None
        if self._path(f"{name.module}.{name.name}") is not None:
            return name.module, ast.Pass()
        top = parsed(path).body
        for node in [*top, *(each for block in top if isinstance(block, ast.If) for each in block.body)]:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if getattr(node, "name", None) == name.name or name.name in names:
                return name.module, node
        again = self._imports(name.module).get(name.name)
        if again is None or again == name:
            return None
        return self._find(again)


def stored() -> dict[str, Signatures]:
    """The stored signatures, by version of vLLM."""
    found: dict[str, Signatures] = json.loads(STORED.read_text()) if STORED.exists() else {}
    return found


def main(directory: Path) -> None:
    """Store the signatures of the version of vLLM in `directory`."""
    source = Source(directory)
    versions = stored() | {source.version: source.signatures()}
    STORED.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
