"""Serves the demo's requests: each engine serves its own ones in order, and halfway one engine's daemon is killed."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tokenlake_bench import demo_wire as wire
from tokenlake_bench.demo_engine_handle import EngineHandle
from tokenlake_bench.demo_plan import ENGINES, DemoPlan
from tokenlake_bench.node_totals import NodeTotals
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share
from tokenlake_bench.workload import Request
from tokenlake_testing.cluster import Cluster

VICTIM = 0
"""Number of the engine whose daemon the demo kills; the daemon's node has the same number."""


@dataclass(slots=True)
class DemoLog:
    """Results of the demo's requests so far. `killed_at`: time of the monotonic clock at which the daemon was
    killed."""

    ran: dict[int, wire.Ran] = field(default_factory=dict)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    read_segments: int = 0
    remote_segments: int = 0
    equal: int = 0
    errors: int = 0
    before_kill: list[int] = field(default_factory=list)
    """Indices in the workload of the requests that ended before the daemon was killed, in the order in which they
    ended."""
    killed_engine: int = VICTIM
    killed_node: str = ""
    killed_at: float = 0.0
    in_flight: int = 0

    @property
    def remote_share(self) -> float:
        """Share of the segments read from the pool that came from other nodes, 0 to 1."""
        return self.remote_segments / max(1, self.read_segments)

    def add(self, request: Request, ran: wire.Ran) -> None:
        """Add the result of a finished request."""
        self.ran[request.index] = ran
        self.hit_tokens += ran.hit_tokens
        self.prompt_tokens += len(request.tokens)
        self.read_segments += ran.read_segments
        self.remote_segments += ran.remote_segments
        self.equal += not ran.error and ran.tokens == ran.cold_tokens
        self.errors += bool(ran.error)
        if not self.killed_node:
            self.before_kill.append(request.index)

    def status(self) -> str:
        """Text about the requests so far for the progress bar."""
        pool = statistics.median(ran.ttft_ms for ran in self.ran.values())
        cold = statistics.median(ran.cold_ttft_ms for ran in self.ran.values())
        return (
            f"hits {format_share(self.hit_tokens / self.prompt_tokens)}, remote {format_share(self.remote_share)}, "
            f"TTFT {pool:.0f} ms (cold {cold:.0f} ms), equal {self.equal} of {len(self.ran)}"
        )


def run_requests(
    cluster: Cluster, engines: list[EngineHandle], plan: DemoPlan, totals: NodeTotals, progress: LiveProgress
) -> DemoLog:
    """Serve all requests of the plan and return their results. Raises TokenLakeError when an engine process ends."""
    log = DemoLog()
    lock = threading.Lock()

    def serve(number: int) -> None:
        for request in plan.workload:
            if request.index % ENGINES != number:
                continue
            kill = number == VICTIM and not log.killed_node and 2 * request.index >= len(plan.workload)
            if kill:
                totals.before_kill(VICTIM)
                if 4 * request.index >= 3 * len(plan.workload):
                    strike(0)
                    kill = False
            ran = engines[number].run(
                wire.Run(request.tokens.tolist(), plan.new_tokens, announce=kill), lambda remote: strike(remote)
            )
            with lock:
                log.add(request, ran)
                progress.update(len(log.ran), log.status())

    def strike(remote: int) -> None:
        """Kill the daemon at node `VICTIM` and start it again. `remote`: number of segments of other nodes that the
        engine of that daemon is reading at this moment; 0 when too many requests passed without such a read."""
        node = cluster.nodes[VICTIM]
        node.kill()
        with lock:
            log.killed_at, log.killed_node, log.in_flight = time.monotonic(), node.name, remote
        node.start()
        progress.say(f"{node.name} killed while {remote} segments were in transfer to it, and started again")

    with ThreadPoolExecutor(ENGINES) as threads:
        for served in [threads.submit(serve, number) for number in range(ENGINES)]:
            served.result()
    return log
