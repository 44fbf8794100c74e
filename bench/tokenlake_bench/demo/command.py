"""`tokenlake demo`: two engines serve conversations that arrive at a fixed rate, three times with the same memory: with
a cache per engine behind two routers, and with a pool. One node's daemon is killed halfway. Then questions about long
documents whose cache is fetched or attended to where it lies, and a restart of all daemons, which keep their cache on
disk. Each request is also computed without a cache, and the tokens are compared."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_bench.baselines import Accesses, infinite_cache
from tokenlake_bench.daemons import EVICTED, sent_bytes, settle
from tokenlake_bench.demo.arrivals import Arrivals, Served, ShortestQueue, private_routers
from tokenlake_bench.demo.engine import Engine, Ran
from tokenlake_bench.demo.plan import NODES, REQUESTS, SEGMENT_TOKENS, DemoPlan, make_plan
from tokenlake_bench.engine.environment import check_modules
from tokenlake_bench.other_programs import OtherPrograms
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, format_share, output, table, verdict, write_json
from tokenlake_bench.routing.base import Router
from tokenlake_testing.cluster import Cluster

CONTROLS = 12
"""Number of requests that are repeated with wrong bytes, to check that a wrong cache changes the tokens."""
WINDOW = 32
VICTIM = 0
"""Number of the node whose daemon is killed, and of its engine."""
PACE = 0.9
"""Time between two arrivals, as a share of the time in which the engines together serve a request without a cache."""
AFTER = 40
"""Number of requests from the kill on that show what it costs."""
OBJECTIVE = 2.0
"""The objective of the time to the first token, in median times of an engine that has no cache and no queue."""
QUIET = 0.2
"""Above this part of the processors, other programs change the durations, and the output says so."""
SHIP_MEMORY = "128MiB"
DOCUMENTS, QUESTIONS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 3, 2, 2048, 24, 4
WRITER, READER = 0, 1
"""Numbers of the engine that stores the documents and of the engine that answers questions about them, and of their
nodes."""
RESTARTED = 60
"""Number of requests before the restart and of those after it; as many fill the pool before."""


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Arguments of the command, and the number of requests."""

    model: Path | None = None
    json_file: Path | None = None
    requests: int = REQUESTS


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests were served by one arrangement of the memory. Rates are hit tokens / prompt tokens;
    `after_kill`: of the `AFTER` requests from the kill on. `in_objective`: share of the requests whose first token came
    within `DemoResult.objective_ms` of their arrival. `busier_share`: share of the requests that went to the engine
    which served most. `equal`: requests with the tokens that the model computes without a cache. `others`: the part of
    all processors that other programs used meanwhile."""

    hit_rate: float
    after_kill: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    in_objective: float
    busier_share: float
    equal: int
    errors: int
    others: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens / prompt tokens of the pool and of a cache that forgets nothing, for the same requests."""

    pool: float
    ideal: float


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake demo`.

    `in_turn`, `cache_aware`: a cache per engine behind each router; `pool`: the same memory as a pool, behind a router
    that prefers the shorter queue to the cache. `ideal`: the hit rate of a cache that forgets nothing. `controls`,
    `controls_changed`: requests that were repeated with wrong bytes from the pool, and those whose tokens changed, as
    they must.
    `served_again_s`: from the kill until the pool's node served a hit; None if it did not. `fetch_bytes`, `ship_bytes`:
    bytes between nodes for questions about documents at another node. `restart_*`: hits before and after a restart of
    all daemons.
    """

    requests: int
    interval_ms: float
    objective_ms: float
    cold_ttft_ms: float
    in_turn: Arrangement
    cache_aware: Arrangement
    pool: Arrangement
    ideal: float
    controls: int
    controls_changed: int
    served_again_s: float | None
    bytes_moved: int
    evicted: int
    ship_tokens: int
    fetch_bytes: int
    ship_bytes: int
    ship_equal: bool
    restart_s: float
    restart_before: Rates
    restart_after: Rates
    restart_equal: bool
    elapsed_s: float


def run_demo(arguments: DemoArguments) -> DemoResult:
    """Run the demo, print its tables, and write the JSON file if the command line names one. Raises TokenLakeError, and
    ModuleNotFoundError where a module of the engines is not installed."""
    # The modules of the engines are checked before the engine processes, which import them, are started.
    check_modules("torch", "transformers")
    console, progress = output(), Console(stderr=True)
    began = time.monotonic()
    with ExitStack() as stack:
        progress.print(f"starting {NODES} engines with {arguments.model or 'a tiny Llama of random weights'}")
        engines = [stack.enter_context(closing(Engine())) for _ in range(NODES)]
        with ThreadPoolExecutor(NODES) as threads:
            loaded, *_ = threads.map(lambda engine: engine.load(arguments.model, SEGMENT_TOKENS), engines)
        if loaded["problem"]:
            raise LayoutRefused(loaded["problem"])
        layout, vocabulary = Layout.decode(bytes.fromhex(loaded["layout"])), loaded["vocabulary"]
        plan = make_plan(arguments.requests, layout, vocabulary, loaded["positions"])
        demo = _Demo(engines, plan)
        figures = demo.compute() | demo.serve() | demo.ship(vocabulary) | demo.restart()
    result = DemoResult(**figures, elapsed_s=time.monotonic() - began)
    _show(console, result, plan, random_model=arguments.model is None)
    write_json(result, arguments.json_file)
    return result


@dataclass
class _Demo:
    engines: Sequence[Engine]
    plan: DemoPlan
    cold: dict[int, Ran] = field(default_factory=dict)
    """By number, each request without a cache."""
    interval_s: float = 0.0
    objective_ms: float = 0.0

    def _cluster(self, nodes: int) -> Cluster:
        return Cluster(nodes, str(self.plan.size.memory), str(self.plan.size.memory))

    def _attach(self, clusters: Sequence[Cluster], mode: str = "fetch", *, corrupt: bool = False) -> None:
        window = self.plan.size.window(WINDOW)
        nodes = [node for cluster in clusters for node in cluster.nodes]
        for engine, node in zip(self.engines, nodes, strict=True):
            engine.attach(node.socket, window, mode, corrupt=corrupt)

    def _ideal(self, numbers: Sequence[int]) -> float:
        """Hit rate of consecutive requests in a cache that has the segments of all earlier ones."""
        size, prompts = self.plan.accesses.segment_tokens, self.plan.accesses.prompts
        earlier, later = (Accesses(size, prompts[:end]) for end in (numbers[0], numbers[-1] + 1))
        hits = infinite_cache(later).hit_tokens - infinite_cache(earlier).hit_tokens
        return hits / (later.prompt_tokens - earlier.prompt_tokens)

    def _rate(self, ran: dict[int, Ran]) -> float:
        tokens = sum(self.plan.accesses.prompts[number].tokens for number in ran)
        return sum(each.hit_tokens for each in ran.values()) / max(1, tokens)

    def _each(self, title: str, numbers: Sequence[int], *, cold: bool = False) -> dict[int, Ran]:
        """Serve requests without a queue: each engine serves every second one."""
        ran: dict[int, Ran] = {}
        lock = threading.Lock()
        with LiveProgress(title, len(numbers)) as progress, ThreadPoolExecutor(NODES) as threads:

            def serve(first: int) -> None:
                run = self.engines[first].run_cold if cold else self.engines[first].run
                for number in numbers[first::NODES]:
                    answer = run(self.plan.tokens(number), self.plan.new_tokens)
                    with lock:
                        ran[number] = answer
                        progress.update(len(ran), "")

            for served in [threads.submit(serve, engine) for engine in range(NODES)]:
                served.result()
        return ran

    def compute(self) -> dict[str, Any]:
        """Compute each request without a cache: the tokens that all others must have, and the times that scale the
        arrivals and the objective."""
        count = len(self.plan.workload)
        self.cold = self._each("without a cache", range(count), cold=True)
        took_s = float(np.mean([ran.took_ms for ran in self.cold.values()])) / 1e3
        ttft_ms = float(np.median([ran.ttft_ms for ran in self.cold.values()]))
        self.interval_s, self.objective_ms = PACE * took_s / NODES, OBJECTIVE * ttft_ms
        return {
            "requests": count,
            "interval_ms": self.interval_s * 1e3,
            "objective_ms": self.objective_ms,
            "cold_ttft_ms": ttft_ms,
            "ideal": self._ideal(range(count)),
        }

    def serve(self) -> dict[str, Any]:
        """Serve all requests as they arrive, once per arrangement of the memory; a daemon is killed when half of them
        have arrived, and started again."""
        figures: dict[str, Any] = {}
        for name, private in private_routers(NODES, self.plan.accesses.segment_tokens).items():
            with ExitStack() as stack:
                clusters = [stack.enter_context(self._cluster(1)) for _ in range(NODES)]
                others = OtherPrograms()
                served, *_ = self._arrive(f"caches of their own, {name}", clusters, private)
                figures[name.replace("-", "_").replace(" ", "_")] = self._arrangement(served, others.share())
        with self._cluster(NODES) as cluster:
            others = OtherPrograms()
            served, lost, again_s = self._arrive(
                "pool", [cluster], ShortestQueue(NODES, self.plan.accesses.segment_tokens)
            )
            pool = self._arrangement(served, others.share())
            for engine in self.engines:
                engine.flush()
            cluster.wait_ready()
            settle(cluster)
            totals = cluster.totals()
            self._attach([cluster], corrupt=True)
            chosen = [each.number for each in served if each.ran.hit_tokens][-CONTROLS:]
            wrong = self._each("control with wrong bytes", sorted(chosen))
        # A request whose segments were displaced meanwhile reads no wrong byte.
        controls = {number: ran for number, ran in wrong.items() if ran.hit_tokens}
        return {
            **figures,
            "pool": pool,
            "controls": len(controls),
            "controls_changed": sum(ran.tokens != self.cold[number].tokens for number, ran in controls.items()),
            "served_again_s": again_s,
            "bytes_moved": sent_bytes(totals) + sent_bytes(lost),
            "evicted": int(totals[EVICTED] + lost.get(EVICTED, 0.0)),
        }

    def _arrive(
        self, title: str, clusters: Sequence[Cluster], router: Router
    ) -> tuple[list[Served], dict[str, float], float | None]:
        """Serve all requests. Returns the answers in order, the last metrics of the daemon that was killed, and the
        seconds until its engine found a hit again."""
        count, victim = len(self.plan.workload), clusters[0].nodes[VICTIM]
        served: list[Served] = []
        lost: dict[str, float] = {}
        killed_s, again_s = 0.0, None
        self._attach(clusters)
        with LiveProgress(title, count) as progress:

            def arrived(number: int) -> None:
                nonlocal killed_s
                if number == count // 2:
                    lost.update(victim.metrics())
                    victim.kill()
                    killed_s = time.monotonic()
                    victim.start()

            def answered(each: Served) -> None:
                nonlocal again_s
                served.append(each)
                late = each.engine == VICTIM and each.number > count // 2
                if late and each.ran.hit_tokens and again_s is None:
                    again_s = time.monotonic() - killed_s
                progress.update(len(served), "")

            arrivals = Arrivals(self.engines, self.plan.accesses.prompts, self.plan.tokens, self.plan.new_tokens)
            arrivals.serve(range(count), router, self.interval_s, arrived, answered)
        return sorted(served, key=lambda each: each.number), lost, again_s

    def _arrangement(self, served: Sequence[Served], others: float) -> Arrangement:
        half = len(served) // 2
        times = [each.ttft_s * 1e3 for each in served]
        engines = [each.engine for each in served]
        p50, p99 = np.percentile(times, (50, 99))
        return Arrangement(
            hit_rate=self._rate({each.number: each.ran for each in served}),
            after_kill=self._rate({each.number: each.ran for each in served[half : half + AFTER]}),
            ttft_p50_ms=float(p50),
            ttft_p99_ms=float(p99),
            in_objective=sum(took <= self.objective_ms for took in times) / len(times),
            busier_share=max(engines.count(engine) for engine in range(NODES)) / len(engines),
            equal=sum(self._equal(each.number, each.ran) for each in served),
            errors=sum(bool(each.ran.error) for each in served),
            others=others,
        )

    def _equal(self, number: int, ran: Ran) -> bool:
        return not ran.error and ran.tokens == self.cold[number].tokens

    def ship(self, vocabulary: int) -> dict[str, Any]:
        """An engine stores documents, and one at another node answers questions about them, by queries that are shipped
        and by fetches."""
        draw = random.Random(7)
        documents = [[draw.randrange(vocabulary) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
        prompts = [
            document + [draw.randrange(vocabulary) for _ in range(QUESTION_TOKENS)]
            for document in documents
            for _ in range(QUESTIONS)
        ]
        asked: dict[str, list[Ran]] = {}
        fetched_bytes = 0.0
        expected = [self.engines[READER].run_cold(prompt, ANSWER_TOKENS).tokens for prompt in prompts]
        with Cluster(NODES, SHIP_MEMORY, SHIP_MEMORY, query_engine="true") as cluster:
            self._attach([cluster])
            for document in documents:
                self.engines[WRITER].run([*document, 0], 1)
            self.engines[WRITER].flush()
            settle(cluster)
            # A fetch leaves cached copies at the reader's node, over which later queries would be computed there.
            for mode in ("ship", "fetch"):
                self._attach([cluster], mode)
                fetched_bytes = sent_bytes(cluster.totals())
                asked[mode] = [self.engines[READER].run(prompt, ANSWER_TOKENS) for prompt in prompts]
                self.engines[READER].flush()
                settle(cluster)
                fetched_bytes = sent_bytes(cluster.totals()) - fetched_bytes
        return {
            "ship_tokens": sum(ran.shipped_tokens for ran in asked["ship"]),
            "fetch_bytes": fetched_bytes,
            "ship_bytes": sum(ran.query_bytes for ran in asked["ship"]),
            "ship_equal": all([ran.tokens for ran in runs] == expected for runs in asked.values()),
        }

    def restart(self) -> dict[str, Any]:
        """Daemons with disks serve the first requests of the plan and are restarted as a whole."""
        count = min(RESTARTED, len(self.plan.workload) // 3)
        parts = [range(part * count, (part + 1) * count) for part in range(3)]
        cluster = self._cluster(NODES)
        cluster.give_disks()
        with cluster:
            self._disks(cluster)
            filled, before = (self._each("with disks", part) for part in parts[:2])
            for engine in self.engines:
                engine.flush()
            settle(cluster)
            began = time.monotonic()
            for node in cluster.nodes:
                node.terminate()
            for node in cluster.nodes:
                node.stop()
                node.start()
            cluster.wait_ready()
            self._disks(cluster)
            took_s = time.monotonic() - began
            after = self._each("after the restart", parts[2])
        return {
            "restart_s": took_s,
            "restart_before": Rates(pool=self._rate(before), ideal=self._ideal(parts[1])),
            "restart_after": Rates(pool=self._rate(after), ideal=self._ideal(parts[2])),
            "restart_equal": all(self._equal(number, ran) for number, ran in (filled | before | after).items()),
        }

    def _disks(self, cluster: Cluster) -> None:
        """Wait until the daemons use their disks, and connect the engines with them."""
        for node in cluster.nodes:
            node.wait_disk()
        self._attach([cluster])


def _show(console: Console, result: DemoResult, plan: DemoPlan, *, random_model: bool) -> None:
    shown = (result.in_turn, result.cache_aware, result.pool)

    def row(name: str, figures: Iterable[str]) -> tuple[str, ...]:
        return name, *figures

    console.print(
        table(
            f"{result.requests} requests of {plan.workload.name}:\n"
            "the same memory as a cache per engine behind two routers, and as a pool",
            ("", "in turn", "cache-aware", "TokenLake"),
            [
                row("hit rate, tokens", (format_share(each.hit_rate) for each in shown)),
                row("first token, median", (format_duration(each.ttft_p50_ms / 1e3) for each in shown)),
                row("first token, p99", (format_duration(each.ttft_p99_ms / 1e3) for each in shown)),
                row(
                    f"within {format_duration(result.objective_ms / 1e3)}",
                    (format_share(each.in_objective) for each in shown),
                ),
                row("at the busier engine", (format_share(each.busier_share) for each in shown)),
                row(f"hit rate, {AFTER} after a kill", (format_share(each.after_kill) for each in shown)),
                row("tokens wrong", (f"{result.requests - each.equal}" for each in shown)),
            ],
            caption=f"one request per {format_duration(result.interval_ms / 1e3)}; without a cache and a queue the "
            f"first token takes {format_duration(result.cold_ttft_ms / 1e3)}",
        ),
        table(
            "",
            (),
            [
                ("hit rate of a cache that forgets nothing", format_share(result.ideal)),
                ("bytes between nodes", format_bytes(result.bytes_moved)),
                ("segments evicted", f"{result.evicted:,}"),
                (f"{result.ship_tokens:,} tokens of documents: bytes fetched", format_bytes(result.fetch_bytes)),
                ("the same attended in place: bytes", format_bytes(result.ship_bytes)),
                ("restart of all daemons, with disks", format_duration(result.restart_s)),
                ("hits before the restart (cache that forgets nothing)", _beside(result.restart_before)),
                ("hits after the restart (cache that forgets nothing)", _beside(result.restart_after)),
                ("elapsed", format_duration(result.elapsed_s)),
            ],
        ),
    )
    again = "did not serve again"
    if result.served_again_s is not None:
        again = f"served a hit again after {format_duration(result.served_again_s)}"
    errors, controls = result.pool.errors, f"{result.controls_changed:,} of {result.controls:,}"
    equal = all(each.equal == result.requests for each in shown)
    for text, good in (
        (f"tokens equal with and without a cache: {equal}", equal),
        (f"tokens of the later parts equal: {result.ship_equal}", result.ship_equal and result.restart_equal),
        (f"control with wrong bytes: {controls} differ; at least one must", result.controls_changed > 0),
        (f"killed node of the pool: errors {errors:,}, {again}", not errors and result.served_again_s is not None),
    ):
        console.print(verdict(text, good=good))
    if any(each.others > QUIET for each in shown):
        used = ", ".join(format_share(each.others) for each in shown)
        console.print(f"Other programs took {used} of the processors meanwhile.")
    if random_model:
        console.print("The model is tiny and random: the hit rates carry over, the milliseconds do not.")


def _beside(rates: Rates) -> str:
    return f"{format_share(rates.pool)} ({format_share(rates.ideal)})"
