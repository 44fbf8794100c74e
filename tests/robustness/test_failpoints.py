"""A daemon kills itself at each named edge and starts again: afterwards all bytes are right and all slots add up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.robustness.failpoints import EDGES, HANDOVER_EDGES, TAKEOVER_EDGES, Edge
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    accounted,
    daemons,
    found_keys,
    local_keys,
    outcomes,
    read,
    store,
    wait_told,
    wait_until,
)
from tokenlake.errors import Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = [pytest.mark.live, pytest.mark.nightly]

FAILPOINT_DAEMON = "tests.robustness.failpoint_daemon"
SEGMENTS = 4
MEMORY = "1MiB"
"""63 slots per node: a few dozen prompts fill them, so that segments are evicted."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2, MEMORY, MEMORY) as cluster:
        yield cluster


class Work:
    """Every kind of request, from the engines of both nodes, until one of the daemons ends."""

    def __init__(self, ending: Pool, other: Pool, seed: int) -> None:
        self.ending = ending
        self.other = other
        self.seed = seed
        self.prompts: list[Prompt] = []
        self.failures: list[str] = []

    def round(self) -> None:
        """Each node's engine stores, gives up a reservation, and reads what the other's engine stored. One prompt is
        stored by both, in turns first by the one or the other."""
        both = [self.other, self.ending]
        twin = self._next_prompt()
        for pool in both if len(self.prompts) % 2 else reversed(both):
            with self._allowed(pool):
                store(pool, twin)
        for pool in both:
            prompt = self._next_prompt()
            with self._allowed(pool):
                store(pool, prompt)
            with self._allowed(pool):
                pool.store(pool.prefix(Prompt(self.seed + 700 + len(self.prompts), SEGMENTS).tokens).keys).abort()
        for pool, prompt in ((self.other, self.prompts[-1]), (self.ending, self.prompts[-2])):
            with self._allowed(pool):
                self.read(pool, prompt)

    def _next_prompt(self) -> Prompt:
        self.prompts.append(Prompt(self.seed + len(self.prompts), SEGMENTS))
        return self.prompts[-1]

    def read(self, pool: Pool, prompt: Prompt) -> None:
        """Compare the segments that a prompt's match finds."""
        with pool.match(pool.prefix(prompt.tokens).keys, deadline_s=PATIENT_S) as lease:
            wrong = prompt.wrong(lease.fetch())
        if wrong:
            self.failures.append(f"{wrong} segments with wrong bytes")

    @contextlib.contextmanager
    def _allowed(self, pool: Pool) -> Iterator[None]:
        """Calls of the engine whose daemon ends may raise `Unreachable`; those of the other engine may only miss."""
        try:
            yield
        except Unreachable as error:
            if pool is self.other:
                self.failures.append(repr(error))

    def run(self, node: Node) -> None:
        """Make rounds in a thread until the node ends. A call that hangs is a failure as well."""

        def go() -> None:
            while node.running and not self.failures:
                self.round()

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"a call hangs, or the edge was not reached in {len(self.prompts)} prompts"
        assert self.failures == []


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_a_daemon_ends_at_an_edge(cluster: Cluster, edge: Edge) -> None:
    seed = 1000 * (1 + EDGES.index(edge))
    print(f"seed {seed}")
    ending = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as attached, cluster.connect(1, LAYOUT) as steady:
        session = steady.engine.session
        ending.kill()
        # The daemon ends at the first, second or third crossing of the edge: at the first it is almost empty.
        ending.start(FAILPOINT_DAEMON, failpoint=f"{edge.name}:{1 + EDGES.index(edge) % 3}")
        process, lives = ending.process, {attached.engine.incarnation}
        assert process is not None
        wait_until(lambda: not ending.running or is_back(attached, lives), "it serves, or ended at its start")
        lives.add(attached.engine.incarnation)
        work = Work(attached, steady, seed)
        work.run(ending)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        assert f"failpoint {edge.name}: this daemon ends" in ending.log.read_text()

        ending.start()
        cluster.wait_ready()
        wait_until(lambda: is_back(attached, lives), "its engine is back")
        wait_told(cluster)
        held = local_keys(steady, work.prompts)
        wait_until(lambda: held <= found_keys(attached, work.prompts), "what the other node holds is found again")
        for pool in (attached, steady):
            for prompt in work.prompts:
                work.read(pool, prompt)
            fresh = Prompt(seed + 500 + (pool is steady), SEGMENTS)
            assert outcomes(store(pool, fresh)) == {Code.COMMITTED}, "the restarted node stores"
            assert read(pool, fresh) == SEGMENTS
        assert work.failures == []
        assert (steady.engine.session, steady.engine.expired, steady.engine.timeouts) == (session, 0, 0), (
            "the other's engine noticed nothing"
        )
    for node in cluster.nodes:
        wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]


@pytest.mark.parametrize("edge", [*HANDOVER_EDGES, *TAKEOVER_EDGES], ids=lambda edge: edge.name)
def test_a_daemon_ends_during_a_hand_over(edge: Edge) -> None:
    """Only the engine of node 0 stores, so that its node becomes full, and hands segments over to node 1."""
    with daemons(2, MEMORY, MEMORY) as cluster:
        ending = cluster.nodes[edge in TAKEOVER_EDGES]
        ending.kill()
        # At the sixth crossing: some segments were handed over before.
        ending.start(FAILPOINT_DAEMON, failpoint=f"{edge.name}:6")
        process = ending.process
        assert process is not None
        cluster.wait_ready()
        prompts: list[Prompt] = []
        with cluster.connect(0, LAYOUT) as writer, cluster.connect(1, LAYOUT) as reader:
            lives = {writer.engine.incarnation, reader.engine.incarnation}

            def stores() -> bool:
                prompts.append(Prompt(50_000 + len(prompts), SEGMENTS))
                with contextlib.suppress(Unreachable):
                    store(writer, prompts[-1])
                return not ending.running

            wait_until(stores, "segments are handed over")
            assert process.wait(LIMIT_S) == -signal.SIGKILL
            assert f"failpoint {edge.name}: this daemon ends" in ending.log.read_text()
            steady, back = (writer, reader) if edge in TAKEOVER_EDGES else (reader, writer)
            ending.start()
            cluster.wait_ready()
            wait_until(lambda: is_back(back, lives), "its engine is back")
            wait_told(cluster)
            # Of the many prompts, the last ones can still be there.
            some = prompts[-40:]
            held = local_keys(steady, some)
            assert held
            wait_until(lambda: held <= found_keys(back, some), "the segments of the other node are found again")
            for pool in (writer, reader):
                for prompt in some:
                    read(pool, prompt)
                fresh = Prompt(90_000 + (pool is reader), SEGMENTS)
                assert outcomes(store(pool, fresh)) == {Code.COMMITTED}, "it serves"
                assert read(pool, fresh) == SEGMENTS
        for node in cluster.nodes:
            wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up")  # type: ignore[misc]


def is_back(pool: Pool, lives: set[int]) -> bool:
    """Is the pool connected to a daemon of an incarnation that is not in `lives`?"""
    with contextlib.suppress(Unreachable):
        # Only a call shows the end of a daemon before the next heartbeat does.
        pool.match([])
    return pool.connected and pool.engine.incarnation not in lives
