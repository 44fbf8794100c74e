"""The command `bench router`: runs the arrangements one after another, each with servers of its own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.engine_bench import VLLM_PYTHON
from tokenlake_bench.environment import check_interpreter, check_modules
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share, write_json
from tokenlake_bench.router.child import HttpChild
from tokenlake_bench.router.engines import Engine, save_chat_model
from tokenlake_bench.router.load import serve, stream
from tokenlake_bench.router.results import Added, RouterResult, Row, added_of, row_of, table
from tokenlake_bench.router.routers import litellm, vllm_router
from tokenlake_bench.router.sessions import Sessions, text
from tokenlake_testing.cluster import Cluster, Node, parse_metrics

ROUTERS: Final = Path(".venv-routers")
"""Directory of the environment that `make install-routers` creates."""
REGION_MIB: Final = 8
PATIENT_NODES: Final = {"match_deadline_ms": "2000", "suspect_ms": "20000"}
"""Settings of the daemons with which other programs on the machine cost no lookup."""
CONNECTED_S: Final = 60.0
WARM_UP_TOKENS: Final = 20
"""Tokens of the requests before the run: fewer than a block of vLLM or a segment of the pool has."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A router, and the engines behind it. `policy`: of vLLM's router; None for LiteLLM, with or without the plug-in.
    `pool`: half of the memory is the pool's."""

    title: str
    policy: str | None
    pool: bool
    plugin: bool = False


ARRANGEMENTS: Final = {
    "plugin": Arrangement("LiteLLM, plug-in, pool", None, True, plugin=True),
    "litellm-pool": Arrangement("LiteLLM, pool", None, True),
    "cache-aware": Arrangement("vllm-router cache_aware", "cache_aware", False),
    "cache-aware-pool": Arrangement("vllm-router cache_aware, pool", "cache_aware", True),
    "round-robin": Arrangement("vllm-router round_robin", "round_robin", False),
}


@dataclass(frozen=True, slots=True)
class RouterArguments:
    """Arguments of the command `bench router`; the command's options describe them."""

    instances: int = 2
    memory_mib: int = 64
    sessions: int = 16
    turns: int = 4
    at_once: int = 4
    seed: int = 0
    deadline_ms: float = 1000.0
    arrangements: str = ",".join(ARRANGEMENTS)
    python: Path | None = None
    routers: Path = ROUTERS
    json_file: Path | None = None

    def __post_init__(self) -> None:
        for name in self.chosen():
            if name not in ARRANGEMENTS:
                raise ConfigurationError("arrangements", name, f"names among {', '.join(ARRANGEMENTS)}")
        for option, least in (("instances", 2), ("sessions", 1), ("turns", 1), ("at_once", 1), ("memory_mib", 32)):
            if getattr(self, option) < least:
                raise ConfigurationError(option, getattr(self, option), f"at least {least}")

    def chosen(self) -> list[str]:
        """Names of the arrangements to run."""
        return [name for name in self.arrangements.split(",") if name]


def run_router(arguments: RouterArguments) -> RouterResult:
    """Run the benchmark, print its table and write the JSON. Raises TokenLakeError."""
    check_modules("transformers", "grpc")
    python = str((arguments.python or VLLM_PYTHON).absolute())
    check_interpreter(python, "vllm")
    for program in ("litellm", "vllm-router"):
        if not (arguments.routers / "bin" / program).exists():
            expected = "an environment with LiteLLM and vLLM's router (`make install-routers` makes .venv-routers)"
            raise ConfigurationError("routers", str(arguments.routers), f"{expected}; it has no {program}")
    sessions = Sessions(arguments.sessions, arguments.turns, seed=arguments.seed)
    console = Console()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tokenlake-bench-") as name:
        model = save_chat_model(Path(name) / "model")
        run = _Run(replace(arguments, routers=arguments.routers.absolute()), sessions, python, model, console)
        result = RouterResult(
            instances=arguments.instances,
            memory_mib=arguments.memory_mib,
            at_once=arguments.at_once,
            deadline_ms=arguments.deadline_ms,
            sessions=asdict(sessions),
            best_share=1 - sessions.distinct_tokens / sessions.prompt_tokens,
            rows=rows,
        )
        for chosen in arguments.chosen():
            directory = Path(name) / chosen
            directory.mkdir()
            rows.append(run.row(ARRANGEMENTS[chosen], directory))
            # A run takes minutes; one that is interrupted leaves its rows.
            if arguments.json_file is not None:
                write_json(result, arguments.json_file)
    console.print(table(result))
    console.print(f"hits of one cache without a limit: {format_share(result.best_share)}")
    for row in rows:
        if row.added is not None:
            console.print(f"{row.arrangement}: choices {row.added.choices}", markup=False)
        if row.first_error is not None:
            console.print(f"{row.arrangement}: {row.errors} errors, the first: {row.first_error}", markup=False)
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    arguments: RouterArguments
    sessions: Sessions
    python: str
    model: Path
    console: Console

    def row(self, arrangement: Arrangement, directory: Path) -> Row:
        """Start the servers of an arrangement, serve the sessions, and end the servers."""
        given = self.arguments
        with ExitStack() as stack:
            own_mib, nodes = given.memory_mib, []
            if arrangement.pool:
                own_mib //= 2
                share = f"{own_mib}MiB"
                region = f"{REGION_MIB}MiB"
                nodes = stack.enter_context(Cluster(given.instances, share, region, **PATIENT_NODES)).nodes
            engines = self._engines(stack, directory, own_mib << 20, nodes)
            if arrangement.policy is None:
                nodes_of = nodes if arrangement.plugin else []
                router = litellm(given.routers, directory, engines, nodes_of, given.deadline_ms)
            else:
                router = vllm_router(given.routers, directory, engines, arrangement.policy)
            stack.callback(router.close)
            for server in (*engines, router):
                server.wait()
            self._warm_up(engines, router, plugin=arrangement.plugin)
            counts, page = [each.counts() for each in engines], _page(router, arrangement)
            router_cpu_s = router.cpu_s()
            requests = self.sessions.sessions * self.sessions.turns
            with LiveProgress(self.console, arrangement.title, requests) as progress:
                done = 0

                def count() -> None:
                    nonlocal done
                    done += 1
                    progress.update(done, "")

                served = serve(router, self.sessions, given.at_once, count)
            router_cpu_s = router.cpu_s() - router_cpu_s
            grown = [engine.counts().since(before) for engine, before in zip(engines, counts, strict=True)]
            added: Added | None = None
            if arrangement.plugin:
                added = added_of(page, _page(router, arrangement))
            return row_of(arrangement.title, served, grown, router_cpu_s, added, os.getloadavg()[0])

    def _engines(self, stack: ExitStack, directory: Path, cache: int, nodes: Sequence[Node]) -> list[Engine]:
        """The engines, which are starting."""
        sockets: list[Path | None] = [node.socket for node in nodes]
        sockets = sockets or [None] * self.arguments.instances
        room = self.sessions.longest + 64
        engines: list[Engine] = []

        def end() -> None:
            for engine in engines:
                engine.terminate()
            for engine in engines:
                engine.close()

        stack.callback(end)
        for number, socket in enumerate(sockets):
            engines.append(Engine(self.python, self.model, directory / f"engine-{number}.log", cache, room, socket))
        return engines

    def _warm_up(self, engines: Sequence[Engine], router: HttpChild, *, plugin: bool) -> None:
        """Let each engine and the router serve once, and wait until the plug-in is connected."""
        for engine in engines:
            self._short(engine, engine.base)
        until = time.monotonic() + CONNECTED_S
        number = 0
        while True:
            number += 1
            self._short(router, f"{router.base} {number}")
            if not plugin or 'tokenlake_router_seconds_count{outcome="chosen"}' in parse_metrics(_metrics(router)):
                return
            if time.monotonic() > until:
                raise Unreachable(f"the plug-in chose no instance: {router.tail()}")
            time.sleep(0.5)

    def _short(self, server: HttpChild, seed: str) -> None:
        try:
            stream(server, [{"role": "user", "content": text(WARM_UP_TOKENS, seed)}], 2)
        except (OSError, ValueError) as error:
            raise Unreachable(f"{server.base} does not serve: {error}: {server.tail()}") from error


def _metrics(router: HttpChild) -> str:
    return router.page("/metrics/")


def _page(router: HttpChild, arrangement: Arrangement) -> dict[str, float]:
    return parse_metrics(_metrics(router)) if arrangement.plugin else {}
