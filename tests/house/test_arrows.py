"""Which package may import which: bench -> testing -> client, query -> client, operator -> server and client, server
and client -> tokenlake_proto, all -> tokenlake. The rules do no I/O; the client is thin. Only the face of the whole,
`tokenlake/__init__.py`, names the client, and loads it where a program uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.structure import circles, graph, imports

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tokenlake": ROOT / "tokenlake",
    "tokenlake_server": ROOT / "server" / "tokenlake_server",
    "tokenlake_operator": ROOT / "server" / "tokenlake_operator",
    "tokenlake_client": ROOT / "client" / "tokenlake_client",
    "tokenlake_query": ROOT / "query" / "tokenlake_query",
    "tokenlake_proto": ROOT / "proto" / "tokenlake_proto",
    "tokenlake_testing": ROOT / "bench" / "tokenlake_testing",
    "tokenlake_bench": ROOT / "bench" / "tokenlake_bench",
}
FACE = ROOT / "tokenlake" / "__init__.py"
# Clock, randomness, network, memory and processes are passed in to the rules.
EDGE = {"asyncio", "mmap", "multiprocessing", "random", "selectors", "socket", "subprocess", "threading"}
BENCH = {"tokenlake_bench", "tokenlake_testing"}
"""The import packages of the distribution tokenlake-bench, which a node does not need."""
FORBIDDEN = {
    "tokenlake": {
        "tokenlake_server",
        "tokenlake_operator",
        "tokenlake_client",
        "tokenlake_query",
        "tokenlake_proto",
        "time",
        *BENCH,
        *EDGE,
    },
    "tokenlake_server": {"tokenlake_operator", "tokenlake_client", "tokenlake_query", *BENCH},
    "tokenlake_operator": {"tokenlake_query", *BENCH},
    "tokenlake_client": {"tokenlake_server", "tokenlake_operator", "tokenlake_query", *BENCH},
    "tokenlake_query": {"tokenlake_server", "tokenlake_operator", *BENCH},
    "tokenlake_proto": {
        "tokenlake",
        "tokenlake_server",
        "tokenlake_operator",
        "tokenlake_client",
        "tokenlake_query",
        *BENCH,
    },
    "tokenlake_testing": {"tokenlake_operator", "tokenlake_query", "tokenlake_bench"},
    "tokenlake_bench": set[str](),
}
# Importing the rules or the client must not load any of these modules.
HEAVY = (
    *("torch", "grpc", "google.protobuf", "scipy", "click", "rich"),
    *("tokenlake_server", "tokenlake_query", "tokenlake_proto", *sorted(BENCH)),
)


def packages(module: Path) -> set[str]:
    """The top-level package of every import of a module."""
    return {name.partition(".")[0] for name in imports(module)}


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_down_only(package: str) -> None:
    modules = sorted({*PACKAGES[package].rglob("*.py")} - {FACE})
    assert modules
    wrong = {
        f"{module.relative_to(ROOT)} imports {name}"
        for module in modules
        for name in packages(module)
        if name in FORBIDDEN[package]
    }
    assert not wrong


ENGINES = "tokenlake_client.engines"
DOORS = ("lmcache", "sglang", "transformers", "vllm.known", "vllm.offloading")
"""The packages below `engines` that integrate one engine, or one kind of cache of an engine."""
CHOOSER = f"{ENGINES}.vllm.front"
"""The module that chooses between the two doors of vLLM."""


def door(name: str) -> str:
    """The door that a module belongs to; empty for a module that several doors use."""
    return next((each for each in DOORS if f"{name}.".startswith(f"{ENGINES}.{each}.")), "")


def test_no_door_imports_another() -> None:
    """What two doors need is in `engines/common` or `engines/devices`, and in `engines/vllm` for the two of vLLM."""
    arrows = graph([PACKAGES["tokenlake_client"]])
    assert {door(name) for name in arrows} == {"", *DOORS}
    found = {
        f"{name} -> {to}"
        for name in arrows.keys() - {CHOOSER}
        for to in arrows[name]
        if door(to) not in ("", door(name))
    }
    engines = {
        f"{name} -> {to}"
        for name in arrows
        for to in arrows[name]
        if f"{ENGINES}.vllm" in to and f"{ENGINES}.vllm" not in name
    }
    assert found | engines == set()


def test_the_product_has_no_import_circle() -> None:
    """Imports for type checkers alone count as well, but those of the face."""
    product = [
        PACKAGES[name]
        for name in ("tokenlake", "tokenlake_server", "tokenlake_operator", "tokenlake_client", "tokenlake_query")
    ]
    arrows = graph(product)
    arrows["tokenlake"] = set()
    assert circles(arrows) == []


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_the_product_s_tests_import_no_benchmark() -> None:
    """Only the benchmarks' own tests, in tests/bench, import benchmarks."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.parent != ROOT / "tests" / "bench"]
    naming = [path for path in modules if "tokenlake_bench" in path.read_text()]
    assert [str(path) for path in naming if "tokenlake_bench" in packages(path)] == []


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import os.path\ndef f():\n    from tokenlake_server.cli import serve\nfrom . import g\n")
    assert packages(module) == {"os", "tokenlake_server"}


@pytest.mark.parametrize("package", ["tokenlake", "tokenlake_client"])
def test_importing_every_light_module_loads_nothing_heavy(package: str) -> None:
    """Each package is imported in a new process. An engine's adapter needs its engine and a router's plug-in its
    router, so both are left out, and so is the client of the control plane, which needs an extra."""
    names = [_dotted(package, path) for path in sorted(PACKAGES[package].rglob("*.py"))]
    light = [name for name in names if not any(each in name for each in (".engines.", ".routers.", ".control"))]
    program = (
        f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr, result.stdout.strip()) == (0, "", "")


def test_the_face_loads_its_names_when_they_are_used() -> None:
    program = (
        "import sys, tokenlake\nprint('tokenlake_client' in sys.modules, 'msgspec' in sys.modules)\n"
        "from tokenlake import *\nfrom tokenlake_client import Pool as pool\n"
        "print(Pool is pool, sorted(set(tokenlake.__all__) - set(dir())), 'grpc' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stderr, result.stdout) == ("", "False False\nTrue [] False\n")


def _dotted(package: str, path: Path) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *parts]).removesuffix(".__init__")
