"""The size of the code, and how much of it one request crosses: `python -m tests.house.structure` prints a report.

A read and a write: calls of functions of the rules (`tokenlake/`), on all nodes of a simulated cluster, from the
engine's request to the last event that it causes. A shipped query: calls of functions of the product in an engine, in
the query engines of its node and of the node that holds half of the segments, and in both daemons.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import tokenlake_server.loop.watchdog  # noqa: F401  declares a metric
from tests.core.scenes import answer, calm, match, placed, store, tell
from tests.house.crossings import PRODUCT, RULES, Crossings, counted_children, counts_of_child
from tests.query.scene import DEADLINE_S, LAYOUT, Text, draw_queries, engine_of, open_view, spread
from tests.robustness.live import daemons
from tests.sim.cluster import Cluster
from tests.sim.engine import Storing
from tokenlake.config import load_config
from tokenlake.metrics import Metric
from tokenlake.wire import engine, peer, query

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
QUERIES = 50


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


def crossed(scene: Callable[[Cluster], Callable[[], None]]) -> Crossings:
    """Functions that the action prepared by `scene` crosses in a quiet cluster of three nodes."""
    cluster = calm(3)
    act = scene(cluster)
    with Crossings(RULES) as crossings:
        act()
    return crossings


def a_read(cluster: Cluster) -> Callable[[], None]:
    """Match, fetch and release of segments that lie at another node."""
    keys = placed(cluster, 1, 2, KEYS)
    store(cluster, cluster.join(1), keys)
    reader = cluster.join(0)
    cluster.run_for(0.1)

    def act() -> None:
        matched = match(cluster, reader, keys)
        assert matched.hits == KEYS
        fetched = answer(cluster, reader.processes[0], engine.Fetch, matched.lease, 0, KEYS, 0.0)
        assert len(fetched.codes) == KEYS
        tell(cluster, reader.processes[0], engine.Release(((matched.lease, 0, KEYS),)))

    return act


def a_write(cluster: Cluster) -> Callable[[], None]:
    """Prepare and commit of segments, until another node has pulled them and the writer may evict its copy."""
    keys = placed(cluster, 1, 2, KEYS)
    writer = cluster.join(0)
    cluster.run_for(0.1)

    def act() -> None:
        writer.store(keys, 0, Storing())
        cluster.run_for(0.1)

    return act


def shipped_query() -> dict[str, Crossings]:
    """Crossings by process of a query of a view whose segments lie at two nodes, in any layer but the first."""
    text = Text(1, 2 * KEYS)
    with (
        counted_children() as counts,
        daemons(2, "8MiB", query_engine="true") as cluster,
        cluster.connect(0, LAYOUT) as pool,
    ):
        spread(cluster, [text])
        children = {f"query engine of {node.name}": engine_of(node) for node in cluster.nodes}
        children |= {f"daemon of {node.name}": node.process.pid for node in cluster.nodes if node.process is not None}
        crossings = Crossings(PRODUCT)
        # The client has a thread per connection; they start when the view is opened.
        with crossings, open_view(pool, text) as view, pool.init_query([(view, 1)]) as buffer:
            buffer.queries[...] = draw_queries(1, 1)

            def query(layer: int) -> None:
                answer = pool.query(buffer, layer, deadline_s=DEADLINE_S).wait()
                assert not answer.lost
                assert answer.sent_bytes > 0

            query(0)
            for process in children.values():
                counts_of_child(counts, process)
            crossings.calls.clear()
            for _ in range(QUERIES):
                query(1)
            shares = {"engine": crossings.per_request(QUERIES)}
            for name, process in children.items():
                shares[name] = counts_of_child(counts, process).per_request(QUERIES)
    return shares


def described(crossings: Crossings) -> str:
    """Counts of functions and modules of the rules, and how many of these modules are in `tokenlake/core`."""
    folder = str(ROOT / PACKAGES["tokenlake/core"])
    inside = {name for name, _ in crossings.calls if name.startswith(folder)}
    return f"{crossings}, {len(inside)} of them in tokenlake/core"


def report() -> None:
    """Print everything."""
    for name, folder in PACKAGES.items():
        files = python_files(ROOT / folder)
        lines = {path: path.read_text().count("\n") for path in files}
        largest = max(files, key=lambda path: lines[path])
        print(f"{name}: {len(files)} files, {sum(lines.values())} lines; largest {largest.name} {lines[largest]}")
    product = [ROOT / PACKAGES[name] for name in ("tokenlake", "server", "client", "query")]
    arrows = graph(product)
    core = {name: found for name, found in arrows.items() if name.startswith("tokenlake.core.")}
    inside = sum(len({to for to in found if to in core}) for found in core.values())
    print(f"import arrows: {sum(map(len, arrows.values()))} in the product, {inside} inside tokenlake/core")
    for group in circles(arrows):
        print(f"circle: {', '.join(group)}")
    print(f"a read: {described(crossed(a_read))}")
    print(f"a write: {described(crossed(a_write))}")
    for name, crossings in shipped_query().items():
        print(f"a shipped query, {name}: {crossings}")
    settings = len(list(load_config(toml_text=None, environ={}, flags={}, uid=0).describe()))
    tags = [len(re.findall(r"tag=\d", Path(str(module.__file__)).read_text())) for module in (engine, peer, query)]
    print(f"settings {settings}, metrics {len(list(Metric.all()))}, message types {tags} (engine, peer, query)")


if __name__ == "__main__":
    report()
