"""The daemon gets the end of each request and of each conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engines.models import family, prompt
from tests.engines.test_shipping import SEGMENT, engine_at
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


def hints_of(log: Path, keys: Sequence[SegmentKey]) -> list[Hints]:
    """As `known_of`, without the access records that the daemon added."""
    return [msgspec.structs.replace(hints, access=NO_ACCESS) for hints in known_of(log, keys)]


def keys_of(cluster: Cluster, engine: TokenLakeEngine, tokens: list[int]) -> Sequence[SegmentKey]:
    """The keys of the full segments of `tokens`."""
    assert engine.layout is not None
    with Pool.connect(cluster.nodes[0].socket, engine.layout, deadlines=PATIENT) as pool:
        return pool.prefix(tokens).keys


def test_the_daemon_gets_the_end_of_requests(tmp_path: Path) -> None:
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
            conversation = keys_of(cluster, engine, cut[:-1])
            stopped = keys_of(cluster, engine, second[0].tolist())
        cluster.nodes[0].stop()
    assert len(conversation) == 5
    assert hints_of(log, conversation) == [CHAT.ended("length", NEW)] * 5
    assert hints_of(log, stopped) == [Hints(stop_reason="stop", output_tokens=5)] * 3


def test_the_daemon_gets_the_end_of_a_conversation(tmp_path: Path) -> None:
    log = tmp_path / "events"
    model = family("llama-gqa")
    ids = torch.tensor([prompt(3 * SEGMENT + 1, 1)])
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    with daemons(1, record=str(log)) as cluster:
        with engine_at(cluster, 0, model, "auto") as engine:
            output = engine.generate(ids, hints=CHAT, **settings)[0].tolist()
            # The last token was not fed to the model, so no cache holds it.
            engine.hint(output[:-1], Hints(Outlook.OVER))
            assert engine.flush(30)
            keys = keys_of(cluster, engine, output[:-1])
        cluster.nodes[0].stop()
    assert hints_of(log, keys) == [Hints(Outlook.OVER, "chat", priority=1, output_tokens=NEW)] * 5


@pytest.mark.parametrize("mode", ["auto", "fetch"])
def test_a_turn_of_a_conversation_is_one_access(tmp_path: Path, mode: str) -> None:
    """The match of the plan, the read and the wait count as one access."""
    log = tmp_path / "events"
    model = family("llama-gqa")
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
