"""The daemon gets the end of each request and of each conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engines.models import SEGMENT, prompt
from tests.engines.test_shipping import engine_at
from tests.robustness.live import PATIENT, daemons
from tokenlake.core.context import CoreConfig
from tokenlake.core.node import NodeCore
from tokenlake.hints import NO_ACCESS, Hints, Outlook
from tokenlake.identity import SegmentKey, TenantId
from tokenlake_client import Pool
from tokenlake_client.engines.transformers import TokenLakeEngine
from tokenlake_testing import event_log
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

NEW = 2 * SEGMENT
CHAT = Hints(Outlook.GOES_ON, "chat", priority=1)


def known_of(log: Path, keys: Sequence[SegmentKey]) -> list[Hints]:
    """The hints of the segments when the daemon with this event log stopped."""
    records = event_log._records(log)
    core = NodeCore(msgspec.msgpack.decode(next(records), type=CoreConfig))
    core.start(msgspec.msgpack.decode(next(records), type=float))
    for body in records:
        record = event_log._decoder.decode(body)
        core.handle(record.event, record.at)
    index = core.store.index(TenantId("default"))
    return [index[key].hints for key in keys]


def keys_of(cluster: Cluster, engine: TokenLakeEngine, tokens: list[int]) -> Sequence[SegmentKey]:
    """The keys of the full segments of `tokens`."""
    assert engine.layout is not None
    with Pool.connect(cluster.nodes[0].socket, engine.layout, deadlines=PATIENT) as pool:
        return pool.prefix(tokens).keys


def test_the_daemon_gets_the_end_of_requests(tmp_path: Path, model: Any) -> None:
    """One is cut off, one stops, and one ends its conversation."""
    log = tmp_path / "events"
    cut, stopped, over = (torch.tensor([prompt(3 * SEGMENT + 1, seed)]) for seed in (1, 2, 3))
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    end = model.generate(stopped, **settings, max_new_tokens=5)[0, -1].item()
    settings["max_new_tokens"] = NEW
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, "auto") as engine:
            conversation, ended = (engine.generate(ids, hints=CHAT, **settings)[0].tolist() for ids in (cut, over))
            engine.generate(stopped, **settings | {"eos_token_id": end})
            # The last token was not fed to the model, so no cache holds it.
            engine.hint(ended[:-1], Hints(Outlook.OVER))
            assert engine.flush(30)
            assert engine.counts.failures == 0
            keys = [keys_of(cluster, engine, tokens[:-1]) for tokens in (conversation, ended)]
            keys.append(keys_of(cluster, engine, stopped[0].tolist()))
        cluster.nodes[0].stop()
    expected = {
        CHAT.ended("length", NEW): 5,
        Hints(Outlook.OVER, "chat", priority=1, output_tokens=NEW): 5,
        Hints(stop_reason="stop", output_tokens=5): 3,
    }
    for some, (hints, count) in zip(keys, expected.items(), strict=True):
        # Without the access records that the daemon added.
        known = [msgspec.structs.replace(each, access=NO_ACCESS) for each in known_of(log, some)]
        assert known == [hints] * count


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_a_turn_of_a_conversation_is_one_access(tmp_path: Path, model: Any, mode: str) -> None:
    """The match of the plan, the read and the wait count as one access."""
    log = tmp_path / "events"
    ids = torch.tensor([prompt(3 * SEGMENT + 1, 1)])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, mode) as engine:
            for _ in range(2):
                ids = torch.cat([engine.generate(ids, **settings), torch.tensor([prompt(3 * SEGMENT, 2)])], dim=1)
                assert engine.flush(30)
            keys = keys_of(cluster, engine, prompt(3 * SEGMENT + 1, 1))
        cluster.nodes[0].stop()
    assert [hints.access.turn for hints in known_of(log, keys)] == [1] * 3
