"""`tokenlake demo`: two engines serve conversations over the cache of three daemons, one of which is killed halfway.
Then questions about long documents whose cache is fetched or attended to where it lies, and a restart of all daemons,
which keep their cache on disk. Each request is also computed without the pool, and the tokens are compared."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_bench.baselines import Accesses, infinite_cache, private_round_robin, private_routed
from tokenlake_bench.daemons import EVICTED, SENT_BYTES, settle
from tokenlake_bench.demo.engine import Engine, Ran
from tokenlake_bench.demo.plan import ENGINES, NODES, REQUESTS, SEGMENT_TOKENS, DemoPlan, make_plan
from tokenlake_bench.engine.environment import check_modules
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_bytes, format_duration, format_share, table, verdict, write_json
from tokenlake_testing.cluster import Cluster

CONTROLS = 12
"""Number of requests that are repeated with wrong bytes, to check that a wrong cache changes the tokens."""
WINDOW = 32
VICTIM = 0
"""Number of the engine whose daemon is killed; the daemon's node has the same number."""
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


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens / prompt tokens of some requests: of the pool, of private caches (one per engine, with the memory of
    all nodes, which are never lost), and of a cache that forgets nothing."""

    requests: int
    pool: float
    private: float
    private_routed: float
    ideal: float


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake demo`.

    `all` and `before_kill`: hits of all requests, and of those before the daemon was killed. `equal`: requests with the
    same tokens as without the pool. `controls`, `controls_changed`: requests that were repeated with wrong bytes from
    the pool, and those whose tokens changed, as they must. `served_again_s`: from the kill until the node served a hit;
    None if it did not. Times to the first token are medians. `fetch_*` and `ship_*`: of questions about documents at
    another node, the bytes between nodes and the times. `restart_*`: hits before and after a restart of all daemons.
    """

    all: Rates
    before_kill: Rates
    equal: int
    errors: int
    controls: int
    controls_changed: int
    served_again_s: float | None
    bytes_moved: int
    evicted: int
    ttft_pool_ms: float
    ttft_cold_ms: float
    ship_tokens: int
    fetch_bytes: int
    ship_bytes: int
    fetch_ttft_ms: float
    ship_ttft_ms: float
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
    console = Console()
    began = time.monotonic()
    with ExitStack() as stack:
        console.print(f"starting {ENGINES} engines with {arguments.model or 'a tiny Llama of random weights'}")
        engines = [stack.enter_context(closing(Engine())) for _ in range(ENGINES)]
        with ThreadPoolExecutor(ENGINES) as threads:
            loaded, *_ = threads.map(lambda engine: engine.load(arguments.model, SEGMENT_TOKENS), engines)
        if loaded["problem"]:
            raise LayoutRefused(loaded["problem"])
        console.print(f"a cold prefill of {loaded['prefill_tokens']:,} tokens takes {loaded['prefill_ms']:.0f} ms")
        layout, vocabulary = Layout.decode(bytes.fromhex(loaded["layout"])), loaded["vocabulary"]
        plan = make_plan(arguments.requests, layout, vocabulary, loaded["positions"])
        note = f"{plan.workload.name}: {len(plan.workload)} requests"
        console.print(f"starting {NODES} daemons for {plan.size.capacity_tokens:,} tokens; {note}", soft_wrap=True)
        demo = _Demo(console, engines, plan)
        figures = demo.serve() | demo.ship(vocabulary) | demo.restart()
    result = DemoResult(**figures, elapsed_s=time.monotonic() - began)
    _show(console, result, plan, random_model=arguments.model is None)
    write_json(result, arguments.json_file)
    return result


@dataclass
class _Demo:
    console: Console
    engines: Sequence[Engine]
    plan: DemoPlan
    ran: dict[int, Ran] = field(default_factory=dict)
    """By number of each request of the first part."""

    def _cluster(self) -> Cluster:
        return Cluster(NODES, str(self.plan.size.memory), str(self.plan.size.memory))

    def _attach(self, cluster: Cluster, mode: str = "fetch", *, corrupt: bool = False) -> None:
        window = self.plan.size.window(WINDOW)
        for engine, node in zip(self.engines, cluster.nodes, strict=False):
            engine.attach(node.socket, window, mode, corrupt=corrupt)

    def _serve(self, numbers: Iterable[int], done: Callable[[int, Ran], None], *, cold: bool) -> None:
        """Let each engine serve its own requests in order; `done` is called with each result, under a lock."""
        chosen, lock = list(numbers), threading.Lock()

        def serve(engine: int) -> None:
            for number in chosen:
                if number % ENGINES == engine:
                    tokens = self.plan.workload[number].tokens.tolist()
                    ran = self.engines[engine].run(tokens, self.plan.new_tokens, cold=cold)
                    with lock:
                        done(number, ran)

        with ThreadPoolExecutor(ENGINES) as threads:
            for served in [threads.submit(serve, engine) for engine in range(ENGINES)]:
                served.result()

    def _rates(self, ran: dict[int, Ran]) -> Rates:
        prompts = [self.plan.accesses.prompts[number] for number in sorted(ran)]
        accesses, capacity = Accesses(self.plan.accesses.segment_tokens, prompts), self.plan.size.capacity_tokens
        whole, first = self.plan.accesses, min(ran, default=0)
        earlier = Accesses(whole.segment_tokens, whole.prompts[:first])
        # A cache that forgets nothing has the segments of all earlier requests.
        ideal = infinite_cache(Accesses(whole.segment_tokens, [*earlier.prompts, *prompts])).hit_tokens
        return Rates(
            requests=len(ran),
            pool=sum(each.hit_tokens for each in ran.values()) / max(1, accesses.prompt_tokens),
            private=private_round_robin(accesses, ENGINES, capacity).rate,
            private_routed=private_routed(accesses, ENGINES, capacity, seed=0).rate,
            ideal=(ideal - infinite_cache(earlier).hit_tokens) / max(1, accesses.prompt_tokens),
        )

    def serve(self) -> dict[str, Any]:
        """The first part: all requests of the plan; a daemon is killed after half of them and started again."""
        count = len(self.plan.workload)
        before: list[int] = []
        killed_s, again_s = 0.0, None
        lost: dict[str, float] = {}
        with self._cluster() as cluster, LiveProgress(self.console, "serving", count) as progress:
            self._attach(cluster)
            victim = cluster.nodes[VICTIM]

            def done(number: int, ran: Ran) -> None:
                nonlocal killed_s, again_s
                self.ran[number] = ran
                if killed_s and again_s is None and number % ENGINES == VICTIM and ran.hit_tokens:
                    again_s = time.monotonic() - killed_s
                progress.update(len(self.ran), self._status())
                # The other engine's request is under way, and reads segments of the daemon that is killed.
                if not killed_s and 2 * len(self.ran) >= count and number % ENGINES == VICTIM:
                    before.extend(self.ran)
                    lost.update(victim.metrics())
                    victim.kill()
                    killed_s = time.monotonic()
                    victim.start()
                    progress.say(f"{victim.name} killed, and started again")

            self._serve(range(count), done, cold=True)
            for engine in self.engines:
                engine.flush()
            cluster.wait_ready()
            settle(cluster)
            totals = cluster.totals()
            self._attach(cluster, corrupt=True)
            chosen = [number for number, ran in sorted(self.ran.items()) if ran.hit_tokens][-CONTROLS:]
            wrong: dict[int, Ran] = {}
            self._serve(chosen, wrong.__setitem__, cold=False)
        # A request whose segments were displaced meanwhile reads no wrong byte.
        controls = {number: ran for number, ran in wrong.items() if ran.hit_tokens}
        return {
            "all": self._rates(self.ran),
            "before_kill": self._rates({number: self.ran[number] for number in before}),
            "equal": sum(ran.equal for ran in self.ran.values()),
            "errors": sum(bool(ran.error) for ran in self.ran.values()),
            "controls": len(controls),
            "controls_changed": sum(ran.tokens != self.ran[number].cold_tokens for number, ran in controls.items()),
            "served_again_s": again_s,
            "bytes_moved": int(totals[SENT_BYTES] + lost.get(SENT_BYTES, 0.0)),
            "evicted": int(totals[EVICTED] + lost.get(EVICTED, 0.0)),
            "ttft_pool_ms": statistics.median(ran.ttft_ms for ran in self.ran.values()),
            "ttft_cold_ms": statistics.median(ran.cold_ttft_ms for ran in self.ran.values()),
        }

    def _status(self) -> str:
        hits = sum(ran.hit_tokens for ran in self.ran.values())
        tokens = sum(self.plan.accesses.prompts[number].tokens for number in self.ran)
        return f"hits {format_share(hits / tokens)}, equal {sum(ran.equal for ran in self.ran.values())}"

    def ship(self, vocabulary: int) -> dict[str, Any]:
        """The second part: an engine stores documents, and one at another node answers questions about them, by queries
        that are shipped and by fetches."""
        self.console.print("questions about long documents at another node: shipped queries, then fetched caches")
        draw = random.Random(7)
        documents = [[draw.randrange(vocabulary) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
        prompts = [
            document + [draw.randrange(vocabulary) for _ in range(QUESTION_TOKENS)]
            for document in documents
            for _ in range(QUESTIONS)
        ]
        asked: dict[str, list[Ran]] = {}
        fetched_bytes = 0.0
        with Cluster(NODES, SHIP_MEMORY, SHIP_MEMORY, query_engine="true") as cluster:
            self._attach(cluster)
            for document in documents:
                self.engines[WRITER].run([*document, 0], 1, cold=False)
            self.engines[WRITER].flush()
            settle(cluster)
            # A fetch leaves cached copies at the reader's node, over which later queries would be computed there.
            for mode in ("ship", "fetch"):
                self._attach(cluster, mode)
                fetched_bytes = cluster.totals()[SENT_BYTES]
                asked[mode] = [self.engines[READER].run(prompt, ANSWER_TOKENS) for prompt in prompts]
                self.engines[READER].flush()
                settle(cluster)
                fetched_bytes = cluster.totals()[SENT_BYTES] - fetched_bytes
        return {
            "ship_tokens": sum(ran.shipped_tokens for ran in asked["ship"]),
            "fetch_bytes": int(fetched_bytes),
            "ship_bytes": sum(ran.query_bytes for ran in asked["ship"]),
            "fetch_ttft_ms": statistics.median(ran.ttft_ms for ran in asked["fetch"]),
            "ship_ttft_ms": statistics.median(ran.ttft_ms for ran in asked["ship"]),
            "ship_equal": all(ran.equal for runs in asked.values() for ran in runs),
        }

    def restart(self) -> dict[str, Any]:
        """The last part: daemons with disks serve the first requests of the plan and are restarted as a whole."""
        count = min(RESTARTED, len(self.plan.workload) // 3)
        parts: list[dict[int, Ran]] = [{}, {}, {}]
        cluster = self._cluster()
        cluster.give_disks()
        with cluster, LiveProgress(self.console, "restart of all daemons", 3 * count) as progress:
            took_s = 0.0
            for number, part in enumerate(parts):
                if number == 2:
                    for engine in self.engines:
                        engine.flush()
                    settle(cluster)
                    began = time.monotonic()
                    for node in cluster.nodes:
                        node.terminate()
                    for node in cluster.nodes:
                        node.stop()
                        node.start()
                if number != 1:
                    cluster.wait_ready()
                    for node in cluster.nodes:
                        node.wait_disk()
                    self._attach(cluster)
                if number == 2:
                    took_s = time.monotonic() - began
                self._serve(range(number * count, (number + 1) * count), part.__setitem__, cold=False)
                progress.update((number + 1) * count, "")
        return {
            "restart_s": took_s,
            "restart_before": self._rates(parts[1]),
            "restart_after": self._rates(parts[2]),
            "restart_equal": all(
                ran.tokens == self.ran[number].cold_tokens for part in parts for number, ran in part.items()
            ),
        }


def _show(console: Console, result: DemoResult, plan: DemoPlan, *, random_model: bool) -> None:
    def rates(name: str, of: Rates) -> tuple[str, ...]:
        return name, *(format_share(rate) for rate in (of.private, of.private_routed, of.pool, of.ideal))

    console.print(
        table(
            f"{plan.workload.name}: hits",
            ("requests", "private, round robin", "private, by prefix", "pool", "infinite cache"),
            [
                rates(f"all {result.all.requests}", result.all),
                rates(f"{result.before_kill.requests} before the kill", result.before_kill),
            ],
        ),
        table(
            "",
            (),
            [
                ("bytes between nodes", format_bytes(result.bytes_moved)),
                ("segments evicted", f"{result.evicted:,}"),
                ("TTFT with the pool, median", format_duration(result.ttft_pool_ms / 1e3)),
                ("TTFT cold, median", format_duration(result.ttft_cold_ms / 1e3)),
                (f"{result.ship_tokens:,} tokens of documents: bytes fetched", format_bytes(result.fetch_bytes)),
                ("the same attended in place: bytes", format_bytes(result.ship_bytes)),
                ("TTFT fetched, median", format_duration(result.fetch_ttft_ms / 1e3)),
                ("TTFT attended in place, median", format_duration(result.ship_ttft_ms / 1e3)),
                ("restart of all daemons, with disks", format_duration(result.restart_s)),
                ("hits before the restart (infinite cache)", _beside(result.restart_before)),
                ("hits after the restart (infinite cache)", _beside(result.restart_after)),
                ("elapsed", format_duration(result.elapsed_s)),
            ],
        ),
    )
    again = "did not serve again"
    if result.served_again_s is not None:
        again = f"served a hit again after {format_duration(result.served_again_s)}"
    total, controls = result.all.requests, f"{result.controls_changed:,} of {result.controls:,}"
    for text, good in (
        (f"tokens equal: {result.equal:,} of {total:,}", result.equal == total),
        (f"tokens of the later parts equal: {result.ship_equal}", result.ship_equal and result.restart_equal),
        (f"control with wrong bytes: {controls} differ; at least one must", result.controls_changed > 0),
        (f"killed node: errors {result.errors:,}, {again}", not result.errors and result.served_again_s is not None),
    ):
        console.print(verdict(text, good=good))
    if random_model:
        console.print("The model is tiny and random: the hit rates carry over, the milliseconds do not.")


def _beside(rates: Rates) -> str:
    return f"{format_share(rates.pool)} ({format_share(rates.ideal)})"
