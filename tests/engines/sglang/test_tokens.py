"""SGLang generates the same greedy tokens with the pool as without it, whatever happens to daemons and pages; a cache
that was changed on purpose changes them. The tests of this module continue each other, because an engine takes long to
start."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.sglang.conftest import (
    PAGE,
    TINY,
    Three,
    counts_of,
    forget,
    pages_of,
    prompt,
    spoil_all,
    tracebacks,
    until_hit,
    until_stored,
)
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPTS = [(1000, 3), (1100, 4), (1200, 5), (64 * 18, 6)]
"""Lengths and seeds; the last one is an exact multiple of a page."""
CHANGING = prompt(1000, 50)
"""The prompt of the tests in which weights change."""


def test_cold_engines_store_and_another_process_loads(engines: Three, cluster: Cluster) -> None:
    for length, seed in PROMPTS:
        answer = engines.first.timed([prompt(length, seed)])
        assert answer.tokens[0] == engines.expected(length, seed)
        assert answer.cached == 0
    until_stored(cluster, sum(length // PAGE for length, _ in PROMPTS))
    for length, seed in PROMPTS:
        answer = engines.second.timed([prompt(length, seed)])
        assert answer.tokens[0] == engines.expected(length, seed)
        assert answer.cached == pages_of(prompt(length, seed)) * PAGE
    found = counts_of(engines.second)
    assert found["this_node"] >= found["loaded_tokens"] == sum(pages_of(prompt(*each)) * PAGE for each in PROMPTS)
    assert found["failures"] == found["loads_failed"] == found["lookups_late"] == 0
    assert counts_of(engines.first)["stored_tokens"] == sum(length // PAGE * PAGE for length, _ in PROMPTS)


def test_the_same_engine_after_its_own_cache_was_emptied(engines: Three) -> None:
    for length, seed in PROMPTS:
        until_hit(
            engines.first, prompt(length, seed), engines.expected(length, seed), pages_of(prompt(length, seed)) * PAGE
        )


def test_prompts_that_share_a_prefix_and_come_back(engines: Three, cluster: Cluster) -> None:
    shared = prompt(1000, 3)
    forked = shared[:640] + prompt(300, 30)
    longer = shared + engines.expected(1000, 3) + prompt(200, 31)
    expected = engines.plain.generate([forked, longer])
    forget(engines.second)
    answer = engines.second.timed([forked])
    assert answer.tokens[0] == expected[0]
    assert answer.cached == 640
    answer = engines.second.timed([longer])
    assert answer.tokens[0] == expected[1]
    assert answer.cached >= 960


def test_requests_at_once(engines: Three) -> None:
    forget(engines.second)
    answers = engines.second.generate([prompt(*each) for each in PROMPTS])
    assert answers == [engines.expected(*each) for each in PROMPTS]


def test_salts_do_not_share(engines: Three) -> None:
    forget(engines.second)
    answer = engines.second.timed([prompt(1000, 3)], salt="other")
    assert answer.tokens[0] == engines.expected(1000, 3)
    assert answer.cached == 0


def test_corrupt_pages_are_recomputed_where_reads_are_verified(engines: Three, cluster: Cluster) -> None:
    until_hit(engines.first, prompt(1000, 3), engines.expected(1000, 3), 960)
    spoil_all(cluster.nodes[0])
    forget(engines.first)
    before = counts_of(engines.first)["loads_failed"]
    answer = engines.first.timed([prompt(1000, 3)])
    assert answer.tokens[0] == engines.expected(1000, 3)
    assert answer.cached == 0
    # The counts of a step are published by the next one.
    engines.first.generate([prompt(10, 99)])
    assert counts_of(engines.first)["loads_failed"] > before


def test_the_control_a_changed_cache_changes_the_tokens(engines: Three, cluster: Cluster) -> None:
    # SGLang recomputes the pages that the test before has spoiled, and stores them again.
    changed = [each for each in PROMPTS if each != (1000, 3)]
    spoil_all(cluster.nodes[0])
    forget(engines.second)
    for length, seed in changed:
        answer = engines.second.timed([prompt(length, seed)])
        assert answer.cached == pages_of(prompt(length, seed)) * PAGE
        assert answer.tokens[0] != engines.expected(length, seed)


def test_a_restarted_daemon(engines: Three, cluster: Cluster) -> None:
    node = cluster.nodes[0]
    node.kill()
    for engine in (engines.first, engines.second):
        forget(engine)
        assert engine.generate([prompt(1100, 4)])[0] == engines.expected(1100, 4)
    node.start()
    cluster.wait_ready()
    until_hit(engines.first, prompt(1100, 4), engines.expected(1100, 4), 1088)
    until_hit(engines.second, prompt(1100, 4), engines.expected(1100, 4), 1088)
    log = engines.second.log.read_text()
    assert len(re.findall("TokenLake: connected to the pool: node", log)) == 1
    assert re.search("TokenLake: lost the daemon at", log)
    assert re.search("TokenLake: the daemon at .* is back", log)


def test_the_daemon_is_killed_while_pages_are_read(engines: Three, cluster: Cluster) -> None:
    node = cluster.nodes[0]
    many = [(900 + seed, 20 + seed) for seed in range(6)]
    for length, seed in many:
        until_hit(engines.first, prompt(length, seed), engines.expected(length, seed), PAGE)
    forget(engines.second)
    killed = threading.Timer(0.05, node.kill)
    killed.start()
    answers = engines.second.generate([prompt(*each) for each in many])
    killed.join()
    assert answers == [engines.expected(*each) for each in many]
    node.start()
    cluster.wait_ready()
    until_hit(engines.second, prompt(*many[0]), engines.expected(*many[0]), PAGE)


def test_weights_that_change_in_place(engines: Three, tmp_path: Path) -> None:
    """Nothing of the old weights is loaded, and the other engines keep their pages."""
    old = engines.expected(1000, 50)
    until_hit(engines.first, CHANGING, old, pages_of(CHANGING) * PAGE)
    other = save_tiny_model(tmp_path / "other", replace(TINY, seed=1))
    assert engines.plain.call("update", model=str(other))
    new = engines.plain.generate([CHANGING])[0]
    assert new != old
    assert engines.first.call("update", model=str(other))
    answer = engines.first.timed([CHANGING])
    assert (answer.tokens[0], answer.cached) == (new, 0)
    # The engine finds its own new pages, and the other one the old pages.
    until_hit(engines.first, CHANGING, new, pages_of(CHANGING) * PAGE)
    until_hit(engines.second, CHANGING, old, pages_of(CHANGING) * PAGE)


def test_without_emptying_the_caches_the_pool_is_not_used(engines: Three, model: Path) -> None:
    forget(engines.second)
    assert engines.second.call("update", model=str(model), flush=False)
    answer = engines.second.timed([CHANGING])
    assert answer.cached == 0
    forget(engines.second)
    until_hit(engines.second, CHANGING, answer.tokens[0], pages_of(CHANGING) * PAGE)


def test_nothing_reached_sglang(engines: Three) -> None:
    for engine in (engines.first, engines.second):
        assert tracebacks(engine) == []
        assert "hook" not in counts_of(engine)
