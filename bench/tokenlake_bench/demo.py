"""`tokenlake demo`: three daemons, two engines, one cache; one daemon is killed halfway. Then queries that are shipped,
and a restart of all daemons."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tokenlake.config import ServerConfig
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench import demo_wire as wire
from tokenlake_bench.baselines import Accesses, infinite_cache, private_round_robin, private_routed
from tokenlake_bench.copies import copies_per_segment
from tokenlake_bench.demo_engine_handle import EngineHandle
from tokenlake_bench.demo_plan import ENGINES, NODES, REQUESTS, SEGMENT_TOKENS, DemoPlan, make_plan
from tokenlake_bench.demo_restart import restart_table, run_restart_part
from tokenlake_bench.demo_run import DemoLog, run_requests
from tokenlake_bench.demo_ship import run_ship_part, ship_table
from tokenlake_bench.environment import check_modules
from tokenlake_bench.load_meter import settle
from tokenlake_bench.node_totals import NodeTotals
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import DemoDetails, DemoResult, RestartPart, ShipResult, UntilKill, demo_table, write_json
from tokenlake_bench.traces import read_mooncake
from tokenlake_testing.cluster import Cluster

CONTROLS = 12
"""Number of requests that the demo repeats with flipped bytes, to check that a wrong cache changes the tokens."""
WINDOW = 32
CACHED_SHARE = ServerConfig().cached_share
SENT_BYTES = "tokenlake_sent_bytes_total"
SHIP_MEMORY = "128MiB"
"""Bytes of memory of each node in the second part of the demo, in which all documents of that part fit."""
EVICTED = "tokenlake_evicted_segments_total"


@dataclass(frozen=True)
class _Outcome:
    log: DemoLog
    reports: list[wire.EngineReport]
    controls: list[bool]
    """For each request that was repeated with flipped bytes, whether its tokens changed, as they should."""
    totals: NodeTotals
    duplication: float


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Arguments of `tokenlake demo`, and the number of requests that they ask for."""

    trace: Path | None = None
    model: Path | None = None
    json_file: Path | None = None
    requests: int = REQUESTS


def run_demo(options: DemoOptions) -> tuple[DemoResult, DemoDetails]:
    """Run the demo, print its tables, and write the JSON file if the command line names one. Raises TokenLakeError, and
    ModuleNotFoundError where a module of the engines is not installed."""
    # The modules of the engines are checked before the engine processes, which import them, are started.
    check_modules("torch", "transformers")
    console = Console()
    if options.trace is not None:
        # The trace is read here, so that an unreadable file is reported before the models are loaded.
        read_mooncake(options.trace, limit=1)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenlake-demo-")))
        console.print(f"starting {ENGINES} engines with {options.model or 'a tiny Llama of random weights'}")
        engines = [stack.enter_context(contextlib.closing(EngineHandle(scratch / f"{n}.log"))) for n in range(ENGINES)]
        loaded = _load(engines, options.model)
        layout = Layout.decode(loaded.layout)
        console.print(f"a cold prefill of {loaded.prefill_tokens:,} tokens takes {loaded.prefill_ms:.0f} ms")
        plan = make_plan(options.trace, options.requests, layout, loaded.vocabulary, loaded.positions)
        console.print(
            f"starting {NODES} daemons for {plan.size.capacity_tokens:,} tokens; "
            f"{plan.workload.name}: {len(plan.workload)} requests{plan.note}",
            soft_wrap=True,
        )
        memory = str(plan.size.memory)
        cluster = stack.enter_context(Cluster(NODES, memory, memory))
        outcome = _serve(console, cluster, engines, plan)
        cluster.close()
        console.print(f"starting {NODES} daemons with query engines, for several questions about long documents")
        with_queries = Cluster(NODES, SHIP_MEMORY, SHIP_MEMORY, query_engine="true")
        with with_queries:
            ship = run_ship_part(console, with_queries, engines, layout, loaded.q_heads, loaded.vocabulary)
        console.print(f"starting {NODES} daemons with disks, for a restart of all")
        with_disks = Cluster(NODES, memory, memory)
        with_disks.give_disks()
        with with_disks:
            restart = run_restart_part(console, with_disks, engines, plan, outcome.log, _window(plan))
    result = _result(plan, outcome, ship, restart)
    details = _details(plan, outcome, time.monotonic() - began, random_model=options.model is None)
    console.print(demo_table(result, details))
    for line in _notes(outcome):
        console.print(line, soft_wrap=True)
    console.print(ship_table(ship))
    console.print(restart_table(restart))
    if options.json_file is not None:
        write_json(result, options.json_file)
    return result, details


def _load(engines: list[EngineHandle], model: Path | None) -> wire.Loaded:
    with ThreadPoolExecutor(ENGINES) as threads:
        loaded = list(threads.map(lambda engine: engine.load(model, SEGMENT_TOKENS), engines))
    if loaded[0].problem:
        raise LayoutRefused(loaded[0].problem)
    first: wire.Loaded = loaded[0]
    return first


def _window(plan: DemoPlan) -> int:
    """Segments that an engine fetches at a time: at most as many as a node keeps as cached copies."""
    return max(1, min(WINDOW, int(CACHED_SHARE * plan.size.node_segments)))


def _serve(console: Console, cluster: Cluster, engines: list[EngineHandle], plan: DemoPlan) -> _Outcome:
    window = _window(plan)
    for engine, node in zip(engines, cluster.nodes, strict=False):
        engine.attach(node.socket, window)
    totals = NodeTotals(cluster)
    with LiveProgress(console, "serving", len(plan.workload)) as progress:
        log = run_requests(cluster, engines, plan, totals, progress)
    reports = [engine.finish() for engine in engines]
    cluster.wait_ready()
    settle(cluster)
    totals.finish()
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(cluster.connect(node, plan.size.layout)) for node in range(NODES)]
        keys = {key for request in plan.workload for key in pools[0].prefix(request.tokens).keys}
        duplication = copies_per_segment(pools, sorted(keys))
    return _Outcome(log, reports, _controls(engines, plan, log), totals, duplication)


def _controls(engines: list[EngineHandle], plan: DemoPlan, log: DemoLog) -> list[bool]:
    """Repeat the last requests that had hits, with the bytes read from the pool flipped. Returns for each request
    whether its tokens changed."""
    chosen = [index for index, ran in log.ran.items() if ran.hit_tokens][-CONTROLS:]
    changed: list[bool] = []
    for request in plan.workload:
        if request.index in chosen:
            engine = engines[request.index % ENGINES]
            ran = engine.run(wire.Run(request.tokens.tolist(), plan.new_tokens, cold=False, flip=True))
            if ran.hit_tokens:
                changed.append(ran.tokens != log.ran[request.index].cold_tokens)
    return changed


def _result(plan: DemoPlan, outcome: _Outcome, ship: ShipResult, restart: RestartPart) -> DemoResult:
    ran, capacity = outcome.log.ran.values(), plan.size.capacity_tokens
    return DemoResult(
        token_hit_rate=outcome.log.hit_tokens / max(1, plan.accesses.prompt_tokens),
        private_token_hit_rate=private_round_robin(plan.accesses, ENGINES, capacity).rate,
        private_routed_token_hit_rate=private_routed(plan.accesses, ENGINES, capacity, seed=0).rate,
        ideal_token_hit_rate=infinite_cache(plan.accesses).rate,
        ttft_pool_ms=statistics.median(each.ttft_ms for each in ran),
        ttft_cold_ms=statistics.median(each.cold_ttft_ms for each in ran),
        tokens_equal=outcome.log.equal == len(outcome.log.ran),
        control_changed_tokens=sum(outcome.controls),
        longest_call_ms=max(report.longest_s for report in outcome.reports) * 1e3,
        errors=outcome.log.errors,
        ship=ship,
        restart=restart,
    )


def _until_kill(plan: DemoPlan, outcome: _Outcome) -> UntilKill:
    log = outcome.log
    done = sorted(log.before_kill)
    accesses = Accesses(plan.accesses.segment_tokens, [plan.accesses.prompts[index] for index in done])
    return UntilKill(
        requests=len(done),
        token_hit_rate=sum(log.ran[index].hit_tokens for index in done) / max(1, accesses.prompt_tokens),
        private_routed_token_hit_rate=private_routed(accesses, ENGINES, plan.size.capacity_tokens, seed=0).rate,
        ideal_token_hit_rate=infinite_cache(accesses).rate,
    )


def _details(plan: DemoPlan, outcome: _Outcome, elapsed_s: float, *, random_model: bool) -> DemoDetails:
    log, reports = outcome.log, outcome.reports
    recovered_at = reports[log.killed_engine].recovered_at
    return DemoDetails(
        workload=plan.workload.name,
        requests=len(log.ran),
        compared=len(log.ran),
        equal=log.equal,
        controls=len(outcome.controls),
        remote_share=log.remote_share,
        duplication=outcome.duplication,
        bytes_moved=outcome.totals.total(SENT_BYTES),
        evictions=outcome.totals.total(EVICTED),
        sent_bytes=outcome.totals.sent_bytes(),
        until_kill=_until_kill(plan, outcome),
        killed_node=log.killed_node,
        served_again_s=recovered_at - log.killed_at if recovered_at > log.killed_at else None,
        elapsed_s=elapsed_s,
        random_model=random_model,
    )


def _notes(outcome: _Outcome) -> list[str]:
    log, reports = outcome.log, outcome.reports
    failed = sum(report.failed_calls for report in reports)
    cut: Counter[str] = Counter()
    for report in reports:
        cut.update(report.cut_by)
    cut.pop(Code.MISSING.name, None)
    return [
        f"the daemon was killed while its engine read {log.in_flight} segments of other nodes; "
        f"{failed} calls to the pool failed, and their segments were recomputed",
        f"hits that ended for a reason other than a missing segment: {_counts(cut)}",
        f"the rows of private caches are computed for {ENGINES} caches, one per engine, which have the memory of all "
        f"{NODES} nodes together and are never lost",
    ]


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {counted[name]:,}" for name in sorted(counted)) or "none"
