"""A cluster is upgraded one node at a time, under load, to a version that adds a field to every message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, outcomes, read, store, total, wait_told, wait_until
from tests.robustness.matrix.measure import Asker, asking
from tests.server import certified
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


@contextmanager
def three(encrypted: bool, kept: bool) -> Iterator[Cluster]:
    make = certified.encrypted if encrypted else Cluster
    cluster = make(NODES, "8MiB", "1MiB", match_deadline_ms="2000", keep_s="600" if kept else "0")
    cluster.deadlines = PATIENT
    with cluster:
        yield cluster


@pytest.mark.parametrize(
    ("encrypted", "kept"), [(False, False), (True, False), (True, True)], ids=["plain", "encrypted", "kept memory"]
)
def test_one_node_at_a_time_is_upgraded_under_load(encrypted: bool, kept: bool) -> None:
    """The load: an engine at each node reads prompts and stores those that are missing. Only the engine of the node
    that restarts may meet errors. `kept`: memory outlives the daemons, so that a node finds what only it had."""
    with ExitStack() as stack:
        cluster = stack.enter_context(three(encrypted, kept))
        pools, loaded = (
            [stack.enter_context(cluster.connect(number, LAYOUT)) for number in range(NODES)] for _ in range(2)
        )
        askers = [Asker(node.name, pool) for node, pool in zip(cluster.nodes, loaded, strict=True)]

        def request(asker: Asker, number: int) -> None:
            prompt = Prompt(number % NODES, SEGMENTS)
            if asker.read(prompt) < SEGMENTS:
                asker.store(prompt)

        wait = stack.enter_context(asking(askers, request))
        wait(NODES)
        for number, node in enumerate(cluster.nodes):
            # What engines of the other nodes computed is found throughout.
            others = [pool for at, pool in enumerate(pools) if at != number]
            stay = [Prompt(100 + 10 * number + at, SEGMENTS) for at in range(2)]
            for pool, prompt in zip(others, stay, strict=True):
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
            own = Prompt(500 + number, SEGMENTS)
            assert outcomes(store(pools[number], own)) == {Code.COMMITTED}
            wait_told(cluster)
            assert node.stop() == 0
            for prompt, pool in itertools.product(stay, others):
                found(pool, prompt)
            node.start(NEWER)
            cluster.wait_ready()
            wait_until(lambda: pools[number].connected and loaded[number].connected, "its engines are back")  # noqa: B023
            assert [asker.failed for at, asker in enumerate(askers) if at != number] == [0, 0]
            askers[number].begin()
            wait(NODES)
            assert [asker.failed + asker.wrong for asker in askers] == [0] * NODES
            # What was computed before is found, from the upgraded node too, and what one node computes, others find.
            for prompt, pool in itertools.product([*stay, *([own] if kept else [])], pools):
                found(pool, prompt)
            for at, pool in enumerate(pools):
                prompt = Prompt(1000 + 10 * number + at, SEGMENTS)
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
                for reader in pools:
                    found(reader, prompt)
            for each in cluster.nodes[number + 1 :]:
                before = total(each, "tokenlake_unknown_messages_total")
                wait_until(
                    lambda: total(each, "tokenlake_unknown_messages_total") > before,  # noqa: B023
                    "messages of a newer type are dropped and counted",
                )
        for node in cluster.nodes:
            log = node.log.read_text()
            assert not [text for text in ("refused", "does not know", "Traceback") if text in log]


def found(pool: Pool, prompt: Prompt) -> None:
    wait_until(lambda: read(pool, prompt) == SEGMENTS, "found, with right bytes")
