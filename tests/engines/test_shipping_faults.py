"""Mode `ship` while daemons and query engines die or hang during a forward pass."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines.models import SEGMENT, prompt
from tests.engines.test_shipping import READER, engine_at, generate, put, shipped
from tests.query.scene import engine_of, serving, wait_serving
from tests.robustness.live import freeze, wait_until
from tokenlake_client.engines.transformers import TokenLakeEngine
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.rest]

OWN = 2 * SEGMENT + 8
"""Tokens after the prefix: five chunks of prefill."""
CHUNK = 8
NEW = 16
OTHERS = (0, 1)
MOMENTS = {"in a prefill": 3, "in a decode": OWN // CHUNK + 6}
"""The index of the call of the second layer, whose queries are the first to be lost."""


def no_daemon(cluster: Cluster, stack: ExitStack, *, kill: bool) -> None:
    """Kill or freeze the daemons of the other nodes; leaving `stack` starts or thaws them."""
    for number in OTHERS:
        node = cluster.nodes[number]
        if kill:
            node.kill()
            stack.callback(wait_serving, cluster, number)
        else:
            node.freeze()
            stack.callback(node.thaw)
    if kill:
        stack.callback(cluster.wait_ready)
        for number in OTHERS:
            stack.callback(cluster.nodes[number].start)


def no_engine(cluster: Cluster, stack: ExitStack, numbers: tuple[int, ...], *, kill: bool) -> None:
    """Kill or freeze the query engines of some nodes; leaving `stack` waits for new ones or thaws them."""
    for number in numbers:
        pid = engine_of(cluster.nodes[number])
        assert pid
        if kill:
            os.kill(pid, signal.SIGKILL)
            stack.callback(wait_serving, cluster, number, pid)
        else:
            freeze(pid)
            stack.callback(os.kill, pid, signal.SIGCONT)


FAULTS: dict[str, Callable[..., None]] = {
    "the other daemons": no_daemon,
    "this query engine": lambda cluster, stack, kill: no_engine(cluster, stack, (READER,), kill=kill),
    "the other query engines": lambda cluster, stack, kill: no_engine(cluster, stack, OTHERS, kill=kill),
}


def at_call(model: Any, number: int, act: Callable[[], None]) -> Any:
    """Call `act` once, between the first and the second layer of a forward pass of the model."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            act()

    return model.model.layers[1].register_forward_pre_hook(count)


def sums_up(engine: TokenLakeEngine) -> None:
    counts = engine.counts
    assert counts.tokens_asked == counts.tokens_hit + counts.tokens_shipped + counts.tokens_computed
    assert counts.requests_without_pool == 0


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "frozen"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_tokens_stay_the_same(cluster: Cluster, model: Any, fault: str, kill: bool, moment: str) -> None:
    seed = 1000 + 10 * list(FAULTS).index(fault) + 2 * kill + list(MOMENTS).index(moment)
    head = prompt(8 * SEGMENT, seed)
    rows = [head + prompt(OWN, seed + 100), head[: 5 * SEGMENT] + prompt(7, seed + 200)]
    put(cluster, model, [head])
    expected, _ = generate(model.generate, rows, max_new_tokens=NEW)
    with engine_at(cluster, READER, model, prefill_chunk=CHUNK, query_deadline=1.0) as engine, ExitStack() as stack:
        hook = at_call(model, MOMENTS[moment], lambda: FAULTS[fault](cluster, stack, kill=kill))
        try:
            tokens, _ = generate(engine.generate, rows, max_new_tokens=NEW)
        finally:
            hook.remove()
        assert tokens == expected
        counts = engine.counts
        assert counts.bytes_sent
        if fault == "this query engine":
            assert counts.steps_void
            assert counts.tokens_shipped == 0
            assert counts.tokens_hit + counts.tokens_computed == counts.tokens_asked
        sums_up(engine)
        # The engine generates the same tokens during the fault and after it.
        assert generate(engine.generate, rows, max_new_tokens=NEW)[0] == expected
        stack.close()
        assert generate(engine.generate, rows, max_new_tokens=NEW)[0] == expected
        sums_up(engine)


def test_a_restarted_query_engine_is_used(cluster: Cluster, model: Any) -> None:
    rows = [prompt(6 * SEGMENT + 3, 2000)]
    put(cluster, model, rows)
    expected, _ = generate(model.generate, rows)
    with engine_at(cluster, READER, model) as engine:
        for kill in (True, False):
            with ExitStack() as stack:
                no_engine(cluster, stack, (READER,), kill=kill)
                assert generate(engine.generate, rows)[0] == expected

            def again() -> bool:
                before = engine.counts.tokens_shipped
                assert generate(engine.generate, rows)[0] == expected
                return engine.counts.tokens_shipped - before == shipped(rows)

            # A late answer to an earlier call shows the engine that the query engine is back.
            wait_until(again, "it is used again")


def test_all_nodes_restart(model: Any) -> None:
    """The segments in memory are lost; they are computed and stored again, and queries are shipped to them."""
    rows = [prompt(6 * SEGMENT + 3, 2100)]
    expected, _ = generate(model.generate, rows)
    with serving(2, "64MiB") as cluster, engine_at(cluster, 1, model) as engine:
        put(cluster, model, rows)
        assert generate(engine.generate, rows)[0] == expected
        assert engine.counts.tokens_shipped == shipped(rows)
        for node in cluster.nodes:
            node.kill()
        assert generate(engine.generate, rows)[0] == expected
        for node in cluster.nodes:
            node.start()
        cluster.wait_ready()
        for number in range(2):
            wait_serving(cluster, number)
        put(cluster, model, rows)
        before = engine.counts.tokens_shipped
        # The engine does not use a failed pool for a second, and its client reconnects meanwhile.
        while engine.counts.tokens_shipped == before:
            assert generate(engine.generate, rows)[0] == expected


def test_only_sent_queries_are_counted(cluster: Cluster, model: Any) -> None:
    """Queries that were never sent to a dead node do not count: they would make the node look fast to the planner."""
    rows = [prompt(6 * SEGMENT + 3, 2200)]
    put(cluster, model, rows)
    expected, _ = generate(model.generate, rows)
    sent: list[int] = []
    with engine_at(cluster, READER, model) as engine, ExitStack() as stack:

        def kill() -> None:
            sent.append(engine.counts.queries_sent)
            no_engine(cluster, stack, OTHERS, kill=True)

        hook = at_call(model, 4, kill)
        try:
            assert generate(engine.generate, rows)[0] == expected
        finally:
            hook.remove()
        assert sent[0]
        layers = len(model.model.layers)
        assert engine.counts.queries_sent - sent[0] <= layers * len(OTHERS)
