"""All state of an object as text, in a fixed order: to see whether something changed, and what."""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from tokenlake.directory.ring import Ring

_UNCHANGING = (type, types.ModuleType, types.BuiltinFunctionType, Ring)
_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, enum.Enum, np.generic, itertools.count)


def snapshot(root: object) -> list[str]:
    """One line for each value that is reached from `root`: attributes, items, what closures, partials and generators
    hold. Two snapshots of an object that nothing changed are equal. Classes, modules and the ring are left out."""
    lines: list[str] = []
    seen: dict[int, int] = {}
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, _PLAIN):
            lines.append(f"{path} = {value!r}")
        elif isinstance(value, _UNCHANGING):
            continue
        elif id(value) in seen:
            lines.append(f"{path} is {seen[id(value)]}")
        else:
            seen[id(value)] = len(seen)
            inside = list(_inside(value))
            lines.append(f"{path}: {type(value).__name__} of {len(inside)}")
            left += ((f"{path}{step}", part) for step, part in reversed(inside))
    return lines


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        yield ".bytes", value.tobytes()
    elif isinstance(value, Mapping):
        for number, (key, item) in enumerate(list(value.items())):
            yield f"[{number}].key", key
            yield f"[{number}]", item
    elif isinstance(value, set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(sorted(value, key=repr)))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".self", value.__self__), (".function", value.__func__.__qualname__))
    elif isinstance(value, types.FunctionType):
        yield ".function", value.__qualname__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:
                # Not assigned yet.
                continue
    elif isinstance(value, types.GeneratorType):
        yield ".locals", dict(value.gi_frame.f_locals) if value.gi_frame is not None else None
    if hasattr(value, "__dict__") and not isinstance(value, types.FunctionType):
        yield from ((f".{name}", item) for name, item in list(vars(value).items()))
    for of in type(value).__mro__:
        slots = of.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not isinstance(value, msgspec.Struct):
                yield f".{name}", getattr(value, name)


def changes(before: list[str], after: list[str], most: int = 10) -> list[str]:
    """The first lines in which they differ; none where they are equal."""
    if before == after:
        return []
    pairs = itertools.zip_longest(before, after, fillvalue="nothing")
    return [f"{was}  ->  {now}" for was, now in itertools.islice((p for p in pairs if p[0] != p[1]), most)]
