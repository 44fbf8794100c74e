"""One scenario for each kind of engine whose segments have a layout of ours: the tokens are those of an engine without
the pool, and a spoiled cache changes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.vllm.conftest import pool_of, prompt
from tests.engines.vllm.spoiling import spoil, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Three:
    """Three engines of one kind."""

    plain: Engine
    """Without the pool."""
    first: Engine
    """Verifies its reads."""
    second: Engine
    """Does not verify its reads."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further arguments of each `generate`."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `Pool.prefix` for the request's keys."""
    before: Sequence[int] = ()
    """The tokens that the engines insert before each prompt."""


def three(start: Callable[..., Engine], cluster: Cluster, model: Path | None = None, **arguments: Any) -> Three:
    """Start the engines, with these arguments of `vllm.LLM`."""
    pool = pool_of(cluster.nodes[0])
    if model is not None:
        arguments["model"] = model
    return Three(start(**arguments), start({**pool, "verify": True}, **arguments), start(pool, **arguments))


def check_scenario(engines: Three, cluster: Cluster, seed: int, many: Sequence[Sequence[int]] | None = None) -> None:
    """Cold, warm, in another process, with a corrupt segment, and after a restart of the daemon, `many` prompts of 769
    to 1,000 tokens have the tokens that an engine without the pool gives them. Without a check a spoiled cache changes
    them."""
    first, second, request = engines.first, engines.second, engines.request
    many = [prompt(1000, seed), prompt(900, seed + 1)] if many is None else many
    expected = engines.plain.generate(many, **request)
    assert first.generate(many, **request) == expected
    assert first.call("flush")
    counts = first.call("counts")
    assert (counts["requests_not_served"], counts["failures"]) == (0, 0), first.log.read_text()[-4000:]
    # Two prompts with the same image share its segment.
    assert counts["tokens_stored"] > 768 * (len(many) - 1)
    for engine in (first, second):
        before = engine.call("counts")
        assert engine.call("forget")
        assert engine.generate(many, **request) == expected
        after = engine.call("counts")
        hit, local = (after[name] - before[name] for name in ("tokens_hit", "tokens_local"))
        assert hit > 768 * (len(many) - 1)
        assert hit + local == 768 * len(many)
    # The control: the engine that does not check its reads computes with the corrupt segments.
    assert spoil(cluster, first, [*engines.before, *many[0]], **engines.identity) == 3
    assert second.call("forget")
    assert second.generate(many[:1], **request) != expected[:1]
    assert first.call("forget")
    assert first.generate(many[:1], **request) == expected[:1]
    assert first.call("counts")["loads_failed"] > 0
    assert second.call("forget")
    # The daemon restarts, without its segments.
    cluster.nodes[0].kill()
    assert first.call("forget")
    assert first.generate(many[1:], **request) == expected[1:]
    cluster.nodes[0].start()
    cluster.wait_ready()
    before = first.call("counts")["tokens_hit"]
    until = time.monotonic() + TIMEOUT_S
    while first.call("counts")["tokens_hit"] == before:
        assert time.monotonic() < until, first.log.read_text()[-4000:]
        assert first.generate(many, **request) == expected
        assert first.call("flush")
        assert first.call("forget")
    for engine in (first, second):
        assert tracebacks(engine) == []
