"""What the connector extends, replaces and calls in vLLM has signatures that fit, in each version that it serves. Needs
no vLLM: `vllm_signatures` has read its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from inspect import Parameter

import pytest

from tests.engines.vllm_signatures import (
    OURS,
    PATCHES,
    Function,
    Name,
    Signatures,
    bases,
    imports,
    kind,
    methods,
    our_classes,
    our_imports,
    parsed,
    signature,
    stored,
)
from tokenlake_client.engines.vllm.patches import Patch

VERSIONS = stored()
NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@pytest.fixture(params=sorted(VERSIONS))
def vllm(request: pytest.FixtureRequest) -> Signatures:
    return VERSIONS[request.param]


def read(text: str) -> list[Parameter]:
    """The parameters of a signature."""
    function = eval(f"lambda {text.partition('(')[2][:-1]}: None")
    return list(inspect.signature(function).parameters.values())


def refused(theirs: str, ours: str) -> str:
    """Why a function with the signature `ours` does not take each call that fits `theirs`; empty if it does."""
    expected, own = read(theirs), read(ours)
    by_name = {each.name: each for each in own}
    rest = {each.kind for each in own}
    positions = [each.name for each in own if each.kind in NAMED]
    for at, each in enumerate(each for each in expected if each.kind in NAMED):
        if positions[at : at + 1] != [each.name]:
            return f"{each.name!r} is not at position {at}"
    for each in expected:
        found = by_name.get(each.name)
        if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            if each.kind not in rest:
                return f"{each} is lacking"
        elif found is None and Parameter.VAR_KEYWORD not in rest:
            return f"{each.name!r} is lacking"
        elif found is not None and each.default is not Parameter.empty and found.default is Parameter.empty:
            return f"{each.name!r} has no default"
    names = {each.name for each in expected}
    extra = [each for each in own if each.name not in names and each.kind not in (Parameter.VAR_POSITIONAL,)]
    needed = [each.name for each in extra if each.default is Parameter.empty and each.kind != Parameter.VAR_KEYWORD]
    return f"{needed} are required" if needed else ""


def ancestors(name: str, vllm: Signatures) -> Iterator[dict[str, str]]:
    """A class of vLLM and its base classes, nearest first."""
    entry = vllm.get(name, {})
    yield entry
    for base in entry.get("bases", "").split():
        yield from ancestors(base, vllm)


def hooks_of(name: str, vllm: Signatures) -> tuple[dict[str, Function], dict[str, str]]:
    """(the methods of a class of the connector, also those of its own base classes; those that it has from vLLM)."""
    node, taken = our_classes()[name]
    own: dict[str, Function] = {}
    theirs: dict[str, str] = {}
    for base in reversed(bases(node)):
        if base in taken:
            for entry in reversed(list(ancestors(str(taken[base]), vllm))):
                theirs |= {method: text for method, text in entry.items() if method not in ("()", "bases", "__init__")}
        elif base in our_classes():
            inherited, more = hooks_of(base, vllm)
            own, theirs = own | inherited, theirs | more
    return own | methods(node), theirs


def test_hooks_take_each_call_of_vllm(vllm: Signatures) -> None:
    compared = 0
    for name in our_classes():
        own, theirs = hooks_of(name, vllm)
        for method in own.keys() & theirs.keys():
            kinds = set(theirs[method].partition("(")[0].split()) - {"abstractmethod"}
            assert set(kind(own[method])) == kinds, f"{name}.{method}"
            assert refused(theirs[method], signature(own[method])) == "", f"{name}.{method}"
            compared += 1
    assert compared > 60


def test_all_abstract_methods_are_implemented(vllm: Signatures) -> None:
    for name, (node, _) in our_classes().items():
        own, theirs = hooks_of(name, vllm)
        # A class that makes objects of other classes has no objects of its own.
        if "__new__" not in methods(node):
            abstract = {method for method, text in theirs.items() if text.startswith("abstractmethod")}
            assert abstract <= own.keys(), name


@pytest.mark.parametrize("patch", PATCHES)
def test_replaced_methods_have_the_arguments_of_their_hooks(vllm: Signatures, patch: Patch) -> None:
    owner, method, hook = patch
    module, _, name = hook.partition(":")
    (ours,) = [node for node in parsed(OURS / f"{module}.py").body if isinstance(node, Function) and node.name == name]
    # The hook gets the object and the method before the arguments.
    own = ", ".join(["self", *(str(each) for each in read(signature(ours))[2:])])
    assert refused(vllm[owner][method], f"({own})") == ""


def test_everything_that_is_imported_exists(vllm: Signatures) -> None:
    assert {str(name) for name in our_imports()} - vllm.keys() == set()


def calls() -> Iterator[tuple[Name, ast.Call]]:
    """The calls of functions and classes that the connector imports from vLLM."""
    for path in OURS.rglob("*.py"):
        taken = imports(parsed(path))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in taken:
                yield taken[node.func.id], node


def test_calls_fit(vllm: Signatures) -> None:
    compared = 0
    for name, call in calls():
        text = vllm[str(name)].get("()", "")
        if text:
            known = read(text)
            given = [*(["self"] if known[:1] and known[0].name == "self" else []), *call.args]
            inspect.Signature(known).bind(*given, **{each.arg: 0 for each in call.keywords if each.arg})
            compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ("(self, a)", "(self, a, b=0)", ""),
        ("(self, a)", "(self, b)", "'a' is not at position 1"),
        ("(self, a, b=0)", "(self, a)", "'b' is not at position 2"),
        ("(self, a=0)", "(self, a)", "'a' has no default"),
        ("(self, *, a)", "(self)", "'a' is lacking"),
        ("(self, *, a)", "(self, **more)", ""),
        ("(self, **more)", "(self)", "**more is lacking"),
        ("(self)", "(self, a)", "['a'] are required"),
    ],
)
def test_what_is_refused(theirs: str, ours: str, reason: str) -> None:
    assert refused(theirs, ours) == reason
