"""What an engine says of a request's end is known to the daemon that keeps its segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engines.models import family, prompt
from tests.engines.test_shipping import SEGMENT, engine_at
from tests.robustness.live import daemons
from tokenlake.core.context import CoreConfig
from tokenlake.core.node import NodeCore
from tokenlake.hints import NO_ACCESS, Hints, Outlook
from tokenlake.identity import SegmentKey, TenantId
from tokenlake_client import Pool
from tokenlake_server import event_log

pytestmark = pytest.mark.live

NEW = 2 * SEGMENT
CHAT = Hints(Outlook.GOES_ON, "chat", priority=1)


def known_of(log: Path, keys: Sequence[SegmentKey]) -> list[Hints]:
    """What a daemon that left this log knew of the segments in its end."""
    records = event_log._records(log)
    core = NodeCore(msgspec.msgpack.decode(next(records), type=CoreConfig))
    core.start(msgspec.msgpack.decode(next(records), type=float))
    for body in records:
        record = event_log._decoder.decode(body)
        core.handle(record.event, record.at)
    index = core.store.index(TenantId("default"))
    return [index[key].hints for key in keys]


def hints_of(log: Path, keys: Sequence[SegmentKey]) -> list[Hints]:
    """The same, but for what it saw by itself."""
    return [msgspec.structs.replace(hints, access=NO_ACCESS) for hints in known_of(log, keys)]


def test_the_daemon_knows_how_requests_ended(tmp_path: Path) -> None:
    log = tmp_path / "events"
    model = family("llama-gqa")
    first, second = (torch.tensor([prompt(3 * SEGMENT + 1, seed)]) for seed in (1, 2))
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    end = model.generate(second, **settings, max_new_tokens=5)[0, -1].item()
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, "auto") as engine:
            cut = engine.generate(first, hints=CHAT, **settings, max_new_tokens=NEW)[0].tolist()
            engine.generate(second, **settings | {"eos_token_id": end}, max_new_tokens=NEW)
            assert engine.flush(30)
            assert engine.counts.failures == 0
            pool = engine._connection.get()
            assert isinstance(pool, Pool)
            conversation = pool.prefix(cut[:-1]).keys
            stopped = pool.prefix(second[0].tolist()).keys
        cluster.nodes[0].stop()
    assert len(conversation) == 5
    assert hints_of(log, conversation) == [CHAT.ended("length", NEW)] * 5
    assert hints_of(log, stopped) == [Hints(stop_reason="stop", output_tokens=5)] * 3


def test_the_daemon_knows_that_a_conversation_is_over(tmp_path: Path) -> None:
    log = tmp_path / "events"
    model = family("llama-gqa")
    ids = torch.tensor([prompt(3 * SEGMENT + 1, 1)])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, "auto") as engine:
            output = engine.generate(ids, hints=CHAT, **settings)[0].tolist()
            # The last token is in no cache.
            engine.hint(output[:-1], Hints(Outlook.OVER))
            assert engine.flush(30)
            pool = engine._connection.get()
            assert isinstance(pool, Pool)
            keys = pool.prefix(output[:-1]).keys
        cluster.nodes[0].stop()
    assert hints_of(log, keys) == [Hints(Outlook.OVER, "chat", priority=1, output_tokens=NEW)] * 5


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_a_turn_of_a_conversation_is_one_use(tmp_path: Path, mode: str) -> None:
    """Looked up to be planned, read, and waited for."""
    log = tmp_path / "events"
    model = family("llama-gqa")
    ids = torch.tensor([prompt(3 * SEGMENT + 1, 1)])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, mode) as engine:
            for _ in range(2):
                ids = torch.cat([engine.generate(ids, **settings), torch.tensor([prompt(3 * SEGMENT, 2)])], dim=1)
                assert engine.flush(30)
            pool = engine._connection.get()
            assert isinstance(pool, Pool)
            keys = pool.prefix(prompt(3 * SEGMENT + 1, 1)).keys
        cluster.nodes[0].stop()
    assert [hints.access.turn for hints in known_of(log, keys)] == [1] * 3
