"""Faults of daemons and segments change no token, and cost one deadline at most."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, pool_of, prompt, until_hit
from tests.engines.vllm.spoiling import spoil, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

NODES = 2

LINE = r"{} \d\d-\d\d \d\d:\d\d:\d\d .*TokenLake: {}"
"""A line in vLLM's log: its level, and its text."""
MATCH_MS = 2000
"""The deadline of a lookup: long enough for a busy machine, and a frozen daemon costs no more."""


@pytest.fixture(scope="module")
def behind(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    """An engine that starts before its daemon. Loads in the background and verifies its reads."""
    cluster.nodes[0].kill()
    pool = pool_of(cluster.nodes[0], verify=True, match_ms=MATCH_MS)
    engine = start(pool, environment={"VLLM_LOGGING_LEVEL": "INFO"})
    engine.generate([prompt(600, 1)])
    cluster.nodes[0].start()
    cluster.wait_ready()
    return engine


def test_a_daemon_that_starts_later_is_used(behind: Engine, plain: Engine) -> None:
    tokens = prompt(600, 1)
    until_hit(behind, tokens, plain.generate([tokens])[0])
    log = behind.log.read_text()
    # Each change of the state is one line, with vLLM's level and time.
    assert len(re.findall(LINE.format("WARNING", "connecting to the pool failed"), log)) == 1
    assert len(re.findall(LINE.format("INFO", "connected to the pool: node"), log)) == 1


def test_a_restarted_daemon(behind: Engine, plain: Engine, cluster: Cluster) -> None:
    tokens = prompt(700, 2)
    expected = plain.generate([tokens])[0]
    until_hit(behind, tokens, expected)
    cluster.nodes[0].kill()
    assert behind.generate([tokens])[0] == expected
    cluster.nodes[0].start()
    cluster.wait_ready()
    until_hit(behind, tokens, expected)
    log = behind.log.read_text()
    assert re.search(LINE.format("WARNING", "lost the daemon"), log)
    assert re.search(LINE.format("INFO", "the daemon .* is back"), log)


def test_corrupt_segments_are_recomputed(behind: Engine, plain: Engine, cluster: Cluster) -> None:
    tokens = prompt(1000, 3)
    expected = plain.generate([tokens])[0]
    until_hit(behind, tokens, expected, 768)
    assert spoil(cluster, behind, tokens) == 3
    before = behind.call("counts")["loads_failed"]
    assert behind.generate([tokens])[0] == expected
    assert behind.call("counts")["loads_failed"] > before
    # Another request that shares the blocks gets the right tokens too.
    behind.call("forget")
    assert behind.generate([tokens, tokens]) == [expected, expected]
    behind.call("forget")


def test_the_owner_is_killed_during_a_load(behind: Engine, plain: Engine, cluster: Cluster) -> None:
    many = [prompt(900 + seed, 20 + seed) for seed in range(6)]
    expected = [plain.generate([tokens], 30)[0] for tokens in many]
    assert behind.generate(many, 30) == expected
    behind.call("flush")
    behind.call("forget")
    answers: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: answers.append(behind.generate(many, 30)))
    thread.start()
    cluster.nodes[1].kill()
    thread.join(TIMEOUT_S)
    assert answers == [expected]
    behind.call("forget")
    assert behind.generate(many, 30) == expected
    cluster.nodes[1].start()
    cluster.wait_ready()


def test_a_frozen_daemon_costs_one_deadline(behind: Engine, plain: Engine, cluster: Cluster) -> None:
    many = [prompt(600 + seed, 40 + seed) for seed in range(6)]
    expected = [plain.generate([tokens])[0] for tokens in many]
    until_hit(behind, many[0], expected[0])
    for node in cluster.nodes:
        node.freeze()
    try:
        late = behind.call("counts")["lookups_late"]
        assert [behind.generate([tokens])[0] for tokens in many] == expected
        # The first request waited for its lookup; no other one was sent.
        assert behind.call("counts")["lookups_late"] == late + 1
    finally:
        for node in cluster.nodes:
            node.thaw()
    behind.call("forget")
    until_hit(behind, many[0], expected[0])


def test_no_hook_ever_raised(behind: Engine) -> None:
    assert "hook start_load_kv failed" not in behind.log.read_text()
    assert tracebacks(behind) == []
