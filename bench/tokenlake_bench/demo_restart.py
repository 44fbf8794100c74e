"""The demo's last part: a cluster with disks is restarted as a whole, and goes on with what it had."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console, RenderableType
from rich.table import Table

from tokenlake_bench import demo_wire as wire
from tokenlake_bench.baselines import Accesses, infinite_cache
from tokenlake_bench.demo_engine_handle import EngineHandle
from tokenlake_bench.demo_plan import ENGINES, DemoPlan
from tokenlake_bench.demo_run import DemoLog
from tokenlake_bench.load_meter import settle
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import RestartPart, format_duration, format_share
from tokenlake_testing.cluster import Cluster

REQUESTS = 60
"""Number of requests before the restart whose hits are compared with those of as many after it, and number of requests
before both, which fill the pool. Shorter plans are cut into three parts."""


def run_restart_part(
    console: Console, cluster: Cluster, engines: list[EngineHandle], plan: DemoPlan, log: DemoLog, window: int
) -> RestartPart:
    """Serve the first requests of the plan with a cluster that is restarted after two thirds of them: all daemons get
    SIGTERM at once and are started again.

    The nodes of `cluster` have disks and nothing stored. `log` has the tokens of the same requests without a pool.
    Raises TokenLakeError when an engine ends.
    """
    count = min(REQUESTS, len(plan.workload) // 3)
    with LiveProgress(console, "serving", 3 * count) as progress:
        _attach(cluster, engines, window)
        filled = _serve(engines, plan, range(count), progress)
        before = _serve(engines, plan, range(count, 2 * count), progress)
        for engine in engines:
            engine.finish()
        settle(cluster)
        began = time.monotonic()
        for node in cluster.nodes:
            node.terminate()
        for node in cluster.nodes:
            node.stop()
        for node in cluster.nodes:
            node.start()
        _attach(cluster, engines, window)
        took_s = time.monotonic() - began
        progress.say(f"all daemons are restarted, and use their disks after {format_duration(took_s)}")
        after = _serve(engines, plan, range(2 * count, 3 * count), progress)
    return RestartPart(
        requests=count,
        hit_rate_before=_hit_rate(plan, before),
        hit_rate_after=_hit_rate(plan, after),
        ideal_before=_ideal_rate(plan, range(count, 2 * count)),
        ideal_after=_ideal_rate(plan, range(2 * count, 3 * count)),
        restart_s=took_s,
        tokens_equal=all(
            not each.error and each.tokens == log.ran[number].cold_tokens
            for number, each in (filled | before | after).items()
        ),
    )


def _attach(cluster: Cluster, engines: Sequence[EngineHandle], window: int) -> None:
    cluster.wait_ready()
    for node in cluster.nodes:
        node.wait_disk()
    for engine, node in zip(engines, cluster.nodes, strict=False):
        engine.attach(node.socket, window)


def _serve(
    engines: Sequence[EngineHandle], plan: DemoPlan, numbers: range, progress: LiveProgress
) -> dict[int, wire.Ran]:
    ran: dict[int, wire.Ran] = {}
    lock = threading.Lock()

    def serve(engine: int) -> None:
        for number in numbers:
            if number % ENGINES == engine:
                request = wire.Run(plan.workload[number].tokens.tolist(), plan.new_tokens, cold=False)
                answer = engines[engine].run(request)
                with lock:
                    ran[number] = answer
                    progress.update(numbers.start + len(ran), f"hits {format_share(_hit_rate(plan, ran))}")

    with ThreadPoolExecutor(ENGINES) as threads:
        for served in [threads.submit(serve, engine) for engine in range(ENGINES)]:
            served.result()
    return ran


def _hit_rate(plan: DemoPlan, ran: Mapping[int, wire.Ran]) -> float:
    tokens = sum(plan.accesses.prompts[number].tokens for number in ran)
    return sum(each.hit_tokens for each in ran.values()) / max(1, tokens)


def _ideal_rate(plan: DemoPlan, numbers: range) -> float:
    """The hit rate of an infinite cache that had all earlier requests too."""
    until, before = (
        infinite_cache(Accesses(plan.accesses.segment_tokens, plan.accesses.prompts[:count]))
        for count in (numbers.stop, numbers.start)
    )
    return (until.hit_tokens - before.hit_tokens) / max(1, until.prompt_tokens - before.prompt_tokens)


def restart_table(result: RestartPart) -> RenderableType:
    """The hits before and after the restart as a table for a terminal."""
    title = f"restart of all daemons, with disks: hits of the next {result.requests} requests"
    table = Table("", "before", "after", title=title, title_justify="left")
    table.add_row("pool", format_share(result.hit_rate_before), format_share(result.hit_rate_after))
    table.add_row("infinite cache", format_share(result.ideal_before), format_share(result.ideal_after))
    table.add_row("restart", "", format_duration(result.restart_s))
    table.add_row("tokens equal", *["yes" if result.tokens_equal else "NO"] * 2)
    return table
