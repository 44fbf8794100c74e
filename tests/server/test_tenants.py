"""Tenants: which processes may connect, as which tenant, and how many; their hints, retention and quotas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, Prompt, daemons, outcomes, read, store, total
from tests.server.raw import Raw
from tests.server.scene import BLUE, RED, tenants, tenants_text
from tokenlake.config import load_config
from tokenlake.errors import CredentialRefused, Refused
from tokenlake.hints import NO_HINTS, Hints, Outlook
from tokenlake.wire import HEADER_BYTES, Code, engine
from tokenlake_client import MatchOptions, Pool
from tokenlake_server.engines.tenants import Tenants
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


def opened(path: Path, token: str) -> set[int]:
    """The regions, of four, that a process with this token can map; the others are refused by number."""
    regions = set()
    with Raw.joined(path, token=token) as raw:
        for region in range(4):
            for write in (False, True):
                raw.send(engine.OpenRegion(9, region, write))
                reply = raw.reply()
                if isinstance(reply, engine.Region):
                    regions.add(region)
                else:
                    assert isinstance(reply, engine.Failed)
                    assert reply.kind == "CredentialRefused"
                    assert f"region {region} " in reply.reason
    return regions


def test_tenants_cannot_read_each_others_segments(tmp_path: Path) -> None:
    file = tenants(tmp_path)
    prompt = Prompt(80, 5)
    with daemons(config=file) as cluster:
        path = cluster.nodes[0].socket
        for token in (None, "no-token", "red-token-012345678", ""):
            with pytest.raises(CredentialRefused) as refused:
                Pool.connect(path, LAYOUT, token, deadlines=PATIENT)
            assert not token or token not in str(refused.value)
        red, blue = (Pool.connect(path, LAYOUT, token, deadlines=PATIENT) for token in (RED, BLUE))
        with red, blue:
            assert (red.engine.tenant, blue.engine.tenant) == ("red", "blue")
            store(red, prompt)
            keys = red.prefix(prompt.tokens).keys
            assert not set(keys) & set(blue.prefix(prompt.tokens).keys)
            with blue.match(keys) as lease:
                assert lease.hits == 0, "not even with the other tenant's keys"
            assert outcomes(store(blue, prompt)) == {Code.COMMITTED}
            assert read(red, prompt) == read(blue, prompt) == 5
            mapped, others = opened(path, RED), opened(path, BLUE)
            assert mapped
            assert others
            assert not mapped & others
            with pytest.raises(Refused, match="another tenant"):
                Pool.connect(path, LAYOUT, BLUE, session=red.engine.session, deadlines=PATIENT)


def of(text: str) -> Tenants:
    return Tenants(load_config(toml_text=text, environ={}, flags={"node": "a"}, uid=os.getuid()).config)


def test_a_caller_that_names_no_tenant_is_told_how() -> None:
    made = of(tenants_text())
    with pytest.raises(CredentialRefused, match="--tenant NAME"):
        made.of_caller("", None)


def test_the_query_engine_needs_no_allowed_uid(tmp_path: Path) -> None:
    """It runs as the daemon's user, who should not be allowed where there are several tenants."""
    made = of(tenants_text(allowed=os.getuid() + 1))
    assert made.identify(os.getuid(), f"{made.query_credential}:blue").name == "blue"
    for token in (BLUE, None, f"{made.query_credential}:green", ":blue"):
        with pytest.raises(CredentialRefused):
            made.identify(os.getuid(), token)


CONNECT_AS_NOBODY = """
import os, sys
from tests.robustness.live import LAYOUT, PATIENT
from tokenlake_client import Pool
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Pool.connect(sys.argv[1], LAYOUT, deadlines=PATIENT)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_uid_that_is_not_allowed() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.socket.chmod(0o666)
        cluster.directory.chmod(0o755)
        ended = subprocess.run(
            [sys.executable, "-c", CONNECT_AS_NOBODY, str(node.socket)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert "CredentialRefused uid 65534 may not use this daemon" in ended.stdout, ended


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def test_an_invalid_hint_closes_the_connection(one: Cluster) -> None:
    """No constructor makes it. `tests/rules/test_hints.py` has each invalid field."""
    with Raw.joined(one.nodes[0].socket) as raw:
        for outlook in (0, 7):
            fields = {name: getattr(NO_HINTS, name) for name in NO_HINTS.__struct_fields__} | {"outlook": outlook}
            body = msgspec.msgpack.encode([26, bytes(32), list(fields.values()), 0])
            raw.write(len(body).to_bytes(HEADER_BYTES, "little") + body)
        assert "'outlook'" in raw.failed().reason
        assert raw.closed()
    assert one.nodes[0].running


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
    file = tenants(tmp_path, red="quota = 0.5")
    kept = Prompt(1, 8)
    with daemons(config=file) as cluster:
        node = cluster.nodes[0]
        red, blue = (Pool.connect(node.socket, LAYOUT, token, deadlines=PATIENT) for token in (RED, BLUE))
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
