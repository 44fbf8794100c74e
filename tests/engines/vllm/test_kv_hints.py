"""Actions of routers in the hints of real requests: the door obeys those that it knows, counts the others, and no
action changes a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import TIMEOUT_S, again, pool_of, prompt, until_hit
from tests.engines.vllm.spoiling import tracebacks
from tests.engines.vllm.test_opaque import SIZES
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_mistral

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

NODES = 2
TOKENS, CACHED, SEGMENTS = 1000, 768, 3
PINNED = "tokenlake_pinned_segments_total"


@pytest.fixture(scope="module")
def engines(start: Callable[..., Engine], cluster: Cluster) -> list[Engine]:
    """One engine on each node."""
    return [start(pool_of(node)) for node in cluster.nodes]


def action(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def grown(engine: Engine, before: dict[str, Any]) -> dict[str, Any]:
    """The counts of actions that have grown."""
    after = engine.call("counts")
    return {
        name.removeprefix("hints_"): after[name] - before[name]
        for name in after
        if name.startswith("hints_") and after[name] != before[name]
    }


def metric(cluster: Cluster, node: int, name: str) -> float:
    return sum(value for key, value in cluster.nodes[node].metrics().items() if key.startswith(name))


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def brought(cluster: Cluster, node: int) -> float:
    found = cluster.nodes[node].metrics()
    return sum(
        value
        for key, value in found.items()
        if key.startswith("tokenlake_prefetched_segments_total") and 'outcome="brought"' in key
    )


@pytest.mark.parametrize("said", ["prefetch", "share"])
def test_a_prompt_comes_before_its_request(engines: list[Engine], plain: Engine, cluster: Cluster, said: str) -> None:
    """A request names the prompt of the next one. The other node has it by then, and the pool supplies it there."""
    first, second = engines
    next_one, now = prompt(TOKENS, 10 + len(said)), prompt(300, 20 + len(said))
    expected, expected_now = plain.generate([next_one, now])
    assert until_hit(first, next_one, expected, CACHED) == CACHED
    before, arrived = second.call("counts"), brought(cluster, 1)
    payload: dict[str, Any] = {"token_ids": next_one, **({"node": cluster.nodes[0].name} if said == "share" else {})}
    assert second.call("hinted", prompt=now, tokens=8, actions=[action(said, **payload)], salt=None) == expected_now
    assert grown(second, before) == {f"{said}_obeyed": 1}
    until(lambda: brought(cluster, 1) >= arrived + SEGMENTS)
    before = second.call("counts")
    assert second.generate([next_one]) == [expected]
    after = second.call("counts")
    assert after["tokens_hit_here"] - before["tokens_hit_here"] == CACHED
    assert after["tokens_hit_remote"] == before["tokens_hit_remote"]


def test_pins_and_retention(engines: list[Engine], plain: Engine, cluster: Cluster) -> None:
    """What a request stores is pinned; so is what another one reads, in the field of vLLM or among its parameters."""
    first = engines[0]
    tokens = prompt(TOKENS, 40)
    (expected,) = plain.generate([tokens])
    before, pinned = first.call("counts"), metric(cluster, 0, PINNED)
    acts = [action("pin", ttl_s=60), action("kv.retain", ttl_s=600)]
    assert first.call("hinted", prompt=tokens, tokens=8, actions=acts, salt=None) == expected
    first.call("flush")
    assert grown(first, before) == {"pin_obeyed": 1, "retain_obeyed": 1}
    until(lambda: metric(cluster, 0, PINNED) == pinned + SEGMENTS)
    cluster.nodes[0].kill()
    cluster.nodes[0].start()
    cluster.wait_ready()
    until_hit(first, tokens, expected)
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": [action("pin")]}
    assert again(first, tokens, params={"kv_hint": envelope})[0] == expected
    until(lambda: metric(cluster, 0, PINNED) == SEGMENTS)


def test_actions_that_are_not_obeyed(engines: list[Engine], plain: Engine) -> None:
    first = engines[0]
    tokens = prompt(600, 50)
    (expected,) = plain.generate([tokens])
    before = first.call("counts")
    acts = [
        action("park"),
        action("pin", version="2.0"),
        action("pin", ttl_s="long"),
        action("prefetch", token_ids=["a"]),
        action("demote"),
    ]
    assert first.call("hinted", prompt=tokens, tokens=8, actions=acts, salt="s") == expected
    expected_counts = {"other_unknown": 1, "pin_refused": 1, "pin_malformed": 1, "prefetch_malformed": 1}
    assert grown(first, before) == {**expected_counts, "demote_obeyed": 1}
    assert again(first, tokens, params={"kv_hints": [7]})[0] == expected
    assert grown(first, before)["other_malformed"] == 1
    assert first.call("counts")["failures"] == before["failures"]
    assert "unknown action 'park'" in first.log.read_text()
    assert tracebacks(first) == []


def test_the_door_of_opaque_layouts(start: Callable[..., Engine], cluster: Cluster, tmp_path: Path) -> None:
    """It pins and demotes, and refuses to bring prompts, whose keys a router does not name."""
    window = save_mistral(tmp_path / "window", SIZES)
    plain, engine = start(model=window), start(pool_of(cluster.nodes[0], match_ms=2000), model=window)
    tokens = prompt(TOKENS, 60)
    (expected,) = plain.generate([tokens])
    until_hit(engine, tokens, expected)
    before, pinned = engine.call("counts"), metric(cluster, 0, PINNED)
    acts = [action("pin"), action("prefetch", token_ids=tokens)]
    assert engine.call("hinted", prompt=tokens, tokens=8, actions=acts, salt=None) == expected
    assert grown(engine, before) == {"pin_obeyed": 1, "prefetch_refused": 1}
    engine.call("flush")
    until(lambda: metric(cluster, 0, PINNED) > pinned)
    assert tracebacks(engine) == []
