"""The daemons of vLLM's nodes restart, and their memory outlives them: the same tokens, and hits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.engines.vllm.conftest import PATIENT_NODES, TIMEOUT_S, again, pool_of, prompt, until_hit
from tests.robustness.live import wait_until
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPTS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "128MiB", "16MiB", keep_s="600", **PATIENT_NODES) as running:
        yield running


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], cluster: Cluster) -> Engine:
    return start(pool_of(cluster.nodes[0], verify=True))


def restart(cluster: Cluster, number: int, how: str) -> None:
    node = cluster.nodes[number]
    if how == "killed":
        node.kill()
    else:
        assert node.stop() == 0
    node.start()
    cluster.wait_ready()


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_the_same_tokens_and_hits(engine: Engine, plain: Engine, cluster: Cluster, how: str) -> None:
    tokens = [prompt(700, 10 * len(how) + seed) for seed in range(PROMPTS)]
    expected = [plain.generate([each])[0] for each in tokens]
    for one, answer in zip(tokens, expected, strict=True):
        until_hit(engine, one, answer, 512)
    restart(cluster, 0, how)
    restart(cluster, 1, how)
    # Lookups in the moment before the engine is connected again are misses.
    wait_until(lambda: again(engine, tokens[0])[1] == 512, "hits are back")
    stored = engine.call("counts")["tokens_stored"]
    assert [again(engine, one) for one in tokens] == [(answer, 512) for answer in expected]
    assert engine.call("counts")["tokens_stored"] == stored, "nothing was stored again"


def test_requests_go_on_while_the_daemon_restarts(engine: Engine, plain: Engine, cluster: Cluster) -> None:
    many = [prompt(900 + seed, 50 + seed) for seed in range(6)]
    expected = [plain.generate([tokens], 30)[0] for tokens in many]
    assert engine.generate(many, 30) == expected
    answers: list[list[list[int]]] = []
    for how in ("in order", "killed"):
        engine.call("flush")
        engine.call("forget")
        thread = threading.Thread(target=lambda: answers.append(engine.generate(many, 30)))
        thread.start()
        restart(cluster, 0, how)
        thread.join(TIMEOUT_S)
    assert answers == [expected] * 2
