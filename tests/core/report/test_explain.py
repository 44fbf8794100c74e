"""Explain: each token of a request is counted once in the funnel, and each missed one has a reason."""

from __future__ import annotations

import pytest

from tests.core.scenes import (
    ROOMY,
    answer,
    calm,
    explained,
    fetch,
    match,
    missed,
    placed,
    read,
    release,
    store,
    stored,
    supplied,
    tell,
)
from tests.sim.arena import SLOTS
from tests.sim.engine import SEGMENT_TOKENS
from tests.sim.prompts import prompt
from tokenlake.core.report import explain
from tokenlake.core.report.account import ENGINE_HAD
from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory.removals import MAX_REMOVALS, RemovalLog
from tokenlake.wire import engine
from tokenlake.wire.funnel import Funnel, MissReason

SIZE = SEGMENT_TOKENS


def why(funnel: Funnel) -> dict[str, int]:
    """Tokens by reason."""
    assert len({each.reason for each in funnel.missed}) == len(funnel.missed)
    return {each.reason: each.tokens for each in funnel.missed}


def test_local_and_fetched_segments_are_supplied() -> None:
    cluster, reader, keys = stored(3, **ROOMY)
    read(cluster, reader, keys[:1], "before")
    reply = match(cluster, reader, keys, "r", 3 * SIZE + 5)
    held = explained(cluster, reader, "r")
    assert (held.here, sum(dict(held.elsewhere).values()), held.held) == (SIZE, 2 * SIZE, 3 * SIZE)
    assert set(dict(held.elsewhere)) <= {"n0", "n1"}
    fetch(cluster, reader, reply.lease, 3)
    release(cluster, reader, reply.lease, 3, read=True)
    funnel = explained(cluster, reader, "r")
    assert (funnel.request, funnel.node, funnel.segment_tokens) == ("r", "n2", SIZE)
    assert (funnel.ideal, funnel.here, funnel.fetched, funnel.supplied) == (3 * SIZE + 5, SIZE, 2 * SIZE, 3 * SIZE)
    assert why(funnel) == {MissReason.TOO_SHORT: 5}


def test_a_fetch_of_local_segments_takes_no_time() -> None:
    cluster, reader, keys = stored(3, **ROOMY)
    read(cluster, reader, keys, "remote")
    cluster.run_for(1.0)
    read(cluster, reader, keys, "local")
    remote, local = cluster.core(2).recent_requests()
    assert (remote.name, local.name) == ("remote", "local")
    assert 0 < remote.fetch_s < 1
    assert local.fetch_s == 0


@pytest.mark.parametrize("had", [0, 5, SIZE, 2 * SIZE, 2 * SIZE + 3, 3 * SIZE + 1, 4 * SIZE, 4 * SIZE + 2, 1000])
def test_tokens_that_the_engine_had(had: int) -> None:
    """They count neither as supplied nor as missed, whether the pool has them or not."""
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    keys = prompt("p", 4)
    store(cluster, reader, keys[:2])
    reply = match(cluster, reader, keys, "r", 4 * SIZE + 5)
    # The engine read both segments although it needed none of the tokens that it had.
    tell(
        cluster, reader.processes[0], engine.Release(((reply.lease, 0, 2),), True, ((reply.lease, had, 1 << 20, 0.0),))
    )
    funnel = explained(cluster, reader, "r")
    expected = {
        MissReason.NEVER_STORED: 4 * SIZE - max(had, 2 * SIZE),
        MissReason.TOO_SHORT: 5 - max(0, had - 4 * SIZE),
    }
    assert (funnel.ideal, funnel.held, funnel.engine_had) == (4 * SIZE + 5, 0, min(had, 4 * SIZE + 5))
    assert funnel.supplied == max(0, 2 * SIZE - had)
    assert why(funnel) == {reason: tokens for reason, tokens in expected.items() if tokens > 0}
    counters = cluster.core(0).counters
    assert missed(counters) == why(funnel)
    assert (counters[ENGINE_HAD], supplied(counters)) == (funnel.engine_had, funnel.supplied)


def test_a_silent_directory_node_is_named() -> None:
    cluster = calm(3, **ROOMY)
    reader = cluster.join(2)
    keys = placed(cluster, 0, 1, 2)
    read(cluster, reader, keys, "r")
    cluster.node(0).freeze()
    funnel = explained(cluster, reader, "r")
    assert why(funnel) == {MissReason.UNKNOWN: 2 * SIZE}
    assert [each.detail for each in funnel.missed] == ["no answer from n0"]
    assert funnel.leaves_at is None
    cluster.node(0).thaw()


def test_a_request_is_found_by_the_beginning_of_its_name() -> None:
    cluster = calm(1)
    reader = cluster.join(0)
    for name in ("a-1-x", "a-12-x", "b", "a-1"):
        read(cluster, reader, [], name)

    def ask_for(name: str) -> engine.Explained:
        reply: engine.Explained = answer(cluster, reader.processes[0], engine.Explain, name)
        return reply

    assert explained(cluster, reader, "a-12").request == "a-12-x"
    assert explained(cluster, reader, "a-1").request == "a-1", "an equal name is never ambiguous"
    ambiguous = ask_for("a-")
    assert (ambiguous.funnel, ambiguous.names) == (None, ("a-1", "a-12-x", "a-1-x"))
    assert ask_for("").names == ("a-1", "b", "a-12-x", "a-1-x")
    assert ask_for("c").names == ()


def test_a_request_of_another_tenant_is_unknown() -> None:
    cluster = calm(1, **ROOMY)
    red, blue = cluster.join(0), cluster.join(0, tenant="blue")
    read(cluster, red, prompt("p", 1), "r")
    assert explained(cluster, red, "r").ideal == SIZE
    for asker, name in ((blue, "r"), (red, "s"), (red, "")):
        assert answer(cluster, asker.processes[0], engine.Explain, name).funnel is None


def test_the_newest_request_of_a_name_is_explained() -> None:
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    read(cluster, reader, prompt("p", 2), "r")
    store(cluster, reader, prompt("p", 2))
    read(cluster, reader, prompt("p", 2), "r")
    funnel = explained(cluster, reader, "r")
    assert (funnel.supplied, funnel.missed) == (2 * SIZE, ())


def test_trails_and_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_TRAILS", 5)
    monkeypatch.setattr(explain, "MAX_KEYS", 6)
    monkeypatch.setattr(explain, "MAX_MISSING", 2)
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    for number in range(9):
        read(cluster, reader, prompt(f"p{number}", 3), f"r{number}")
    census = cluster.core(0).census()
    assert (census["explained requests"], census["segments they missed"]) == (3, 6)
    funnel = explained(cluster, reader, "r8")
    assert why(funnel) == {MissReason.NEVER_STORED: 2 * SIZE, MissReason.UNKNOWN: SIZE}
    assert answer(cluster, reader.processes[0], engine.Explain, "r0").funnel is None
    history = RemovalLog()
    for index in range(MAX_REMOVALS + 2):
        history.add(TenantId("red"), SegmentKey(index.to_bytes(32, "little")), float(index), "lru")
    assert len(history) == MAX_REMOVALS
    assert history.get(TenantId("red"), SegmentKey(bytes(32))) is None


def test_long_requests_count_more_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of a trail count towards the bound beside its keys."""
    monkeypatch.setattr(explain, "MAX_MISSING", 1)
    monkeypatch.setattr(explain, "MAX_KEYS", 100)
    cluster = calm(1, **ROOMY)
    reader = cluster.join(0)
    for number in range(10):
        match(cluster, reader, prompt(f"p{number}", 32 * 30), f"r{number}")
    cluster.check()
    assert cluster.core(0).census()["explained requests"] == 3


def test_a_prompt_that_parts_from_others_names_the_token() -> None:
    """The prompt shares one segment with another one, and a third prompt shares nothing."""
    cluster = calm(3, **ROOMY)
    writer, reader = cluster.join(0), cluster.join(2)
    shared, mine = placed(cluster, 0, 1, 1, "system"), placed(cluster, 0, 1, 2, "mine")
    store(cluster, writer, shared)
    read(cluster, reader, shared, "first")
    read(cluster, reader, shared + mine, "r")
    read(cluster, reader, placed(cluster, 0, 1, 3, "nonce"), "apart")
    funnel, apart = explained(cluster, reader, "r"), explained(cluster, reader, "apart")
    assert (funnel.leaves_at, funnel.recent, funnel.alone) == (SIZE, 3, 1)
    assert apart.leaves_at == 0
    assert explained(cluster, reader, "first").leaves_at is None


def test_a_prompt_that_was_evicted_does_not_part() -> None:
    cluster = calm(1, regions=1, **ROOMY)
    reader = cluster.join(0)
    keys = prompt("first", 2)
    store(cluster, reader, keys)
    for turn in range(3):
        store(cluster, reader, prompt(f"next {turn}", SLOTS))
    read(cluster, reader, keys, "known")
    read(cluster, reader, [*keys, *prompt("tail", 1)], "longer")
    assert explained(cluster, reader, "known").leaves_at is None
    assert explained(cluster, reader, "longer").leaves_at == 2 * SIZE
