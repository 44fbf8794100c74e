"""The size of the code, and how much of it one request crosses: `python -m tests.house.structure` prints a report.

A read and a write: calls of functions of the rules (`tokenlake/`), on all nodes of a simulated cluster, from the
engine's request to the last event that it causes.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tests.core.scenes import calm, placed, read, store
from tests.sim.cluster import Cluster
from tests.sim.engine import Storing

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tokenlake": "tokenlake",
    "tokenlake/core": "tokenlake/core",
    "server": "server/tokenlake_server",
    "client": "client/tokenlake_client",
    "query": "query/tokenlake_query",
    "bench": "bench/tokenlake_bench",
    "tests": "tests",
}
KEYS = 2


def python_files(folder: Path) -> list[Path]:
    """Every module below `folder`."""
    return sorted(folder.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name of a module of the checkout."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] in ("tokenlake", "tests") else relative.parts[1:]
    return ".".join(parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of the modules, and of what is taken from them, that a module imports, also inside functions and for
    type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(found)


def graph(folders: list[Path]) -> dict[str, set[str]]:
    """Import arrows between the modules below `folders`. An import of a package counts as one of the modules that its
    `__init__` gathers, and not where the importing module is one of them."""
    files = {module_name(path): path for folder in folders for path in python_files(folder)}
    arrows = {name: (imports(path) & files.keys()) - {name} for name, path in files.items()}
    return {name: {to for to in found if not name.startswith(f"{to}.")} for name, found in arrows.items()}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (strongly connected components of more than one; Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for to in sorted(arrows[name]):
            if to not in index:
                visit(to)
                low[name] = min(low[name], low[to])
            elif to in stack:
                low[name] = min(low[name], index[to])
        if low[name] == index[name]:
            at = stack.index(name)
            group, stack[at:] = sorted(stack[at:]), []
            if len(group) > 1:
                found.append(group)

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def a_read(cluster: Cluster) -> Callable[[], object]:
    """Match, fetch and release of segments that lie at another node."""
    keys = placed(cluster, 1, 2, KEYS)
    store(cluster, cluster.join(1), keys)
    reader = cluster.join(0)
    cluster.run_for(0.1)
    return lambda: read(cluster, reader, keys)


def a_write(cluster: Cluster) -> Callable[[], object]:
    """Prepare and commit of segments, until their directory node names the writer."""
    keys, writer = placed(cluster, 1, 2, KEYS), cluster.join(0)
    cluster.run_for(0.1)

    def act() -> None:
        writer.store(keys, 0, Storing())
        cluster.run_for(0.1)

    return act


def crossed(scene: Callable[[Cluster], Callable[[], object]]) -> str:
    """Counts of the functions that the action prepared by `scene` calls in a quiet cluster of three nodes."""
    act, calls, rules = scene(calm(3)), Counter[tuple[str, str]](), f"{ROOT / PACKAGES['tokenlake']}{os.sep}"

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(rules) and not code.co_name.startswith("<"):
            calls[code.co_filename, code.co_qualname] += 1

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    modules = {name for name, _ in calls}
    inside = sum(name.startswith(str(ROOT / PACKAGES["tokenlake/core"])) for name in modules)
    return f"{calls.total()} calls, {len(calls)} functions, {len(modules)} modules, {inside} of them in tokenlake/core"


def report() -> None:
    """Print everything."""
    for name, folder in PACKAGES.items():
        files = python_files(ROOT / folder)
        lines = {path: path.read_text().count("\n") for path in files}
        largest = max(files, key=lambda path: lines[path])
        print(f"{name}: {len(files)} files, {sum(lines.values())} lines; largest {largest.name} {lines[largest]}")
    arrows = graph([ROOT / PACKAGES[name] for name in ("tokenlake", "server", "client", "query")])
    print(f"import arrows: {sum(map(len, arrows.values()))} in the product")
    for group in circles(arrows):
        print(f"circle: {', '.join(group)}")
    print(f"a read: {crossed(a_read)}")
    print(f"a write: {crossed(a_write)}")


if __name__ == "__main__":
    report()
