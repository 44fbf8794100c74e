"""Hints, retention, quotas and bytes per tenant on real daemons, and invalid hints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, outcomes, read, store, total
from tests.server.raw import Raw, hello
from tokenlake.hints import NO_HINTS, Hints, Outlook
from tokenlake.wire import HEADER_BYTES, Code, engine
from tokenlake.wire.engine import MAX_CHANGED
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

TENANTS = """
allow_uids = [{uid}]

[[tenants]]
name = "red"
secret = "{red}"
tokens = ["red-token-0123456789"]
quota = 0.5

[[tenants]]
name = "blue"
secret = "{blue}"
tokens = ["blue-token-0123456789"]
"""
BAD: dict[str, Any] = {"outlook": 7, "category": "x" * 33, "priority": 2, "ttl_s": float("nan")}


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.fixture
def node(one: Cluster) -> Node:
    return one.nodes[0]


def hinted(**fields: Any) -> bytes:
    """The frame of an `Hint` that no constructor would make."""
    values = {name: getattr(NO_HINTS, name) for name in NO_HINTS.__struct_fields__} | fields
    body = msgspec.msgpack.encode([26, bytes(32), list(values.values()), 0])
    return len(body).to_bytes(HEADER_BYTES, "little") + body


@pytest.mark.parametrize("field", BAD)
def test_an_invalid_hint_closes_the_connection(node: Node, field: str) -> None:
    with Raw(node.socket) as raw:
        raw.send(hello())
        assert isinstance(raw.reply(), engine.Welcome)
        raw.write(hinted())
        raw.write(hinted(**{field: BAD[field]}))
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert f"'{field}'" in failed.reason
        assert raw.closed()
    assert node.running


def test_a_hint_about_too_many_keys_closes_the_connection(node: Node) -> None:
    with Raw(node.socket) as raw:
        raw.send(hello())
        assert isinstance(raw.reply(), engine.Welcome)
        raw.send(engine.Hint(bytes(32) * (MAX_CHANGED + 1), Hints(Outlook.OVER)))
        failed = raw.reply()
        assert isinstance(failed, engine.Failed)
        assert "'max_changed'" in failed.reason
        assert raw.closed()
    assert node.running


def test_an_invalid_hint_cannot_be_made() -> None:
    for field, value in BAD.items():
        with pytest.raises(ValueError, match=f"'{field}'"):
            Hints(**{field: value})


def test_segments_of_high_priority_stay(one: Cluster) -> None:
    """The priority is given at the store, at a read, or later."""
    prompts = [Prompt(100 + number, 2) for number in range(3)]
    with one.connect(0, LAYOUT) as pool:
        keys = [pool.prefix(prompt.tokens).keys for prompt in prompts]
        high = Hints(priority=1)
        pool.store_all(keys[0], prompts[0].fill, patience=20.0, hints=high)
        pool.store_all(keys[1], prompts[1].fill, patience=20.0)
        with pool.match(keys[1], MatchOptions(hints=high)) as lease:
            assert lease.hits == 2
        pool.store_all(keys[2], prompts[2].fill, patience=20.0)
        pool.hint(keys[2], high)
        low = Prompt(200, 2)
        pool.store_all(pool.prefix(low.tokens).keys, low.fill, patience=20.0)
        with pool.match(pool.prefix(low.tokens).keys) as lease:
            lease.hint(Hints(Outlook.OVER, priority=-1))
        slots = int(total(one.nodes[0], "tokenlake_slots"))
        plain = Prompt(300, 2)
        store(pool, plain)
        number = 400
        while total(one.nodes[0], "tokenlake_evicted_segments_total") < 2 * slots:
            assert outcomes(store(pool, Prompt(number, 8))) == {Code.COMMITTED}
            number += 1
        assert read(pool, low) == 0
        assert read(pool, plain) == 0
        assert [read(pool, prompt) for prompt in prompts] == [2, 2, 2]


def test_a_tenant_evicts_only_its_own_segments(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text(TENANTS.format(uid=os.getuid(), red="aa" * 32, blue="bb" * 32))
    file.chmod(0o600)
    kept = Prompt(1, 8)
    with daemons(config=str(file)) as cluster:
        node = cluster.nodes[0]
        red, blue = (
            Pool.connect(node.socket, LAYOUT, f"{name}-token-0123456789", deadlines=PATIENT) for name in ("red", "blue")
        )
        with red, blue:
            store(blue, kept)
            for number in range(30):
                store(red, Prompt(100 + number, 16))
            assert read(blue, kept) == kept.segments
            blue.match([]).release()
            regions = {key: value for key, value in node.metrics().items() if key.startswith("tokenlake_regions{")}
            assert sum(value for key, value in regions.items() if 'tenant="red"' in key) == 2
            assert total(node, "tokenlake_spare_bytes") > 0
            segment = LAYOUT.segment_bytes
            written = {name: by_tenant(node, "tokenlake_written_bytes_total", name) for name in ("red", "blue")}
            assert written == {"red": 30 * 16 * segment, "blue": 8 * segment}
            assert by_tenant(node, "tokenlake_read_bytes_total", "blue") == 8 * segment


def by_tenant(node: Node, name: str, tenant: str) -> float:
    return node.metrics().get(f'{name}{{tenant="{tenant}"}}', 0.0)
