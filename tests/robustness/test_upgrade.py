"""A cluster is upgraded one node at a time, under load, to a version that adds a field to every message."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, outcomes, read, store, total, wait_told, wait_until
from tests.server import certified
from tokenlake.errors import Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing import fork_server
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.rest]

NEWER = "tests.robustness.newer_daemon"
NODES = 3
SEGMENTS = 6


@pytest.fixture(autouse=True)
def _executed() -> Iterator[None]:
    """The newer version replaces messages before anything imports them."""
    with fork_server.executed():
        yield


class Load:
    """An engine at each node, in a thread of its own, that reads prompts and stores those that are missing."""

    def __init__(self, pools: list[Pool], prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.restarting: int | None = None
        """The node whose engine may meet errors now."""
        self.rounds = [0] * len(pools)
        self.errors: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=each) for each in enumerate(pools)]

    def _run(self, number: int, pool: Pool) -> None:
        for prompt in itertools.cycle(self.prompts):
            if self._stopped.is_set():
                return
            try:
                if read(pool, prompt) < prompt.segments:
                    store(pool, prompt)
                self.rounds[number] += 1
            except Unreachable as error:
                if self.restarting != number:
                    self.errors.append(f"node {number}: {error}")
                self._stopped.wait(0.02)
            except BaseException as error:
                self.errors.append(f"node {number}: {error!r}")
                raise

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Wait until every engine has read each prompt again."""
        before = list(self.rounds)
        more = len(self.prompts)
        wait_until(
            lambda: bool(self.errors) or all(now >= then + more for now, then in zip(self.rounds, before, strict=True)),
            "engines go on",
        )
        assert not self.errors


@contextmanager
def three(encrypted: bool) -> Iterator[Cluster]:
    make = certified.encrypted if encrypted else Cluster
    cluster = make(NODES, "8MiB", "1MiB", match_deadline_ms="2000")
    cluster.deadlines = PATIENT
    with cluster:
        yield cluster


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_one_node_at_a_time_is_upgraded_under_load(encrypted: bool) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(three(encrypted))
        pools, loaded = (
            [stack.enter_context(cluster.connect(number, LAYOUT)) for number in range(NODES)] for _ in range(2)
        )
        load = stack.enter_context(Load(loaded, [Prompt(seed, SEGMENTS) for seed in range(NODES)]))
        load.goes_on()
        for number, node in enumerate(cluster.nodes):
            # What engines of the other nodes computed is found throughout.
            others = [pool for at, pool in enumerate(pools) if at != number]
            kept = [Prompt(100 + 10 * number + at, SEGMENTS) for at in range(2)]
            for pool, prompt in zip(others, kept, strict=True):
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
            wait_told(cluster)
            load.restarting = number
            assert node.stop() == 0
            for prompt, pool in itertools.product(kept, others):
                wait_until(lambda: read(pool, prompt) == SEGMENTS, "found while the node is down")  # noqa: B023
            node.start(NEWER)
            cluster.wait_ready()
            wait_until(lambda: pools[number].connected and loaded[number].connected, "its engines are back")  # noqa: B023
            load.restarting = None
            load.goes_on()
            # What was computed before is found, from the upgraded node too, and what one node computes, others find.
            for prompt, pool in itertools.product(kept, pools):
                wait_until(lambda: read(pool, prompt) == SEGMENTS, "found after the upgrade of a node")  # noqa: B023
            for at, pool in enumerate(pools):
                prompt = Prompt(1000 + 10 * number + at, SEGMENTS)
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
                for reader in pools:
                    wait_until(lambda: read(reader, prompt) == SEGMENTS, "found from every node")  # noqa: B023
            before = [total(each, "tokenlake_unknown_messages_total") for each in cluster.nodes[number + 1 :]]
            for each, count in zip(cluster.nodes[number + 1 :], before, strict=True):
                wait_until(
                    lambda: total(each, "tokenlake_unknown_messages_total") > count,  # noqa: B023
                    "messages of a newer type are dropped and counted",
                )
        for node in cluster.nodes:
            log = node.log.read_text()
            assert "refused" not in log
            assert "does not know" not in log
            assert "Traceback" not in log
