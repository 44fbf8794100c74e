"""The real `lmcache server` and vLLM: a second server and engine generate the same greedy tokens from what the first
one stored in the pool; a cache that was changed on purpose changes them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.engines.vllm.conftest import DEADLINES, TINY, prompt
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.lmcache_server import LMCACHE, LMCacheServer
from tokenlake_testing.tiny_model import save_tiny_model

if not (LMCACHE / "lmcache").is_dir():
    pytest.skip("LMCache is not installed (`make install-lmcache`)", allow_module_level=True)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CHUNK = 256
CHUNK_BYTES = CHUNK * TINY.layers * TINY.kv_heads * (TINY.hidden // TINY.heads) * 2 * 4
PROMPTS = [prompt(1000 + 100 * number, 40 + number) for number in range(3)]
CHUNKS = sum(len(each) // CHUNK for each in PROMPTS)
REGIONS = 64
TIMEOUT_S = 120.0
PATIENT = {"match_ms": 20000, "call_ms": 20000, "fetch_ms": 20000, "write_patience_s": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "128MiB", "16MiB") as running:
        yield running


@contextlib.contextmanager
def serving(model: Path, log: Path, node: Node, **settings: Any) -> Iterator[tuple[LMCacheServer, Engine]]:
    """A server of LMCache with the pool behind it, and an engine at that server."""
    params = {"socket": str(node.socket), "engine": "vllm float32", **PATIENT, **settings}
    plugin = {
        "type": "plugin",
        "module_path": "tokenlake_client.engines.lmcache",
        "class_name": "TokenLakeL2",
        "adapter_params": params,
    }
    with LMCacheServer(sys.executable, 256, CHUNK, l2=plugin) as server:
        engine = Engine(model, log, environment=server.environment, transfer=server.transfer)
        try:
            engine.generate([prompt(40, 9)], 1)
            server.hide_memory()
            yield server, engine
        finally:
            engine.close()


def counts(server: LMCacheServer) -> dict[str, Any]:
    """The adapter's part of the server's status."""

    def find(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if value.get("type") == "TokenLakeL2":
                yield value
            for each in value.values():
                yield from find(each)
        elif isinstance(value, list):
            for each in value:
                yield from find(each)

    return next(find(server.status()))


def spoil_all(node: Node) -> None:
    """Overwrite every object in the memory of a node with zeros."""
    layout = OpaqueLayout(
        model_id="spoils",
        weights_digest="w",
        engine="test",
        cache="c",
        shards=1,
        shard_bytes=CHUNK_BYTES,
        segment_tokens=CHUNK,
    )
    spoiled = 0
    with Pool.connect(node.socket, layout, deadlines=DEADLINES) as pool:
        for region in range(REGIONS):
            with contextlib.suppress(Exception):
                slots = pool.link.regions.get(region, write=True).slots
                if slots.shape[1] == CHUNK_BYTES:
                    slots[:] = 0
                    spoiled += len(slots)
    assert spoiled


def test_a_second_server_loads_what_the_first_one_stored(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes[0]
    with serving(model, tmp_path / "first.log", node) as (server, engine):
        # A first answer is computed: nothing is in any cache.
        expected = engine.generate(PROMPTS)
        until = time.monotonic() + TIMEOUT_S
        while counts(server)["tokens_stored"] < CHUNKS * CHUNK:
            assert time.monotonic() < until, (counts(server), server.log.read_text()[-4000:])
            time.sleep(0.05)
        assert counts(server)["failures"] == 0, server.log.read_text()[-4000:]
    with serving(model, tmp_path / "second.log", node) as (server, engine):
        # The first lookup connects to the pool, and is a miss.
        _until_connected(server, engine)
        answer = engine.timed(PROMPTS)
        assert answer.tokens == expected
        found = counts(server)
        # LMCache computes the last token: of a prompt of whole chunks it uses one chunk less.
        assert answer.cached >= (CHUNKS - len(PROMPTS)) * CHUNK
        assert found["tokens_loaded"] == found["tokens_hit_here"] == CHUNKS * CHUNK
        assert found["failures"] == found["loads_failed"] == found["pages_not_read"] == 0
        assert "Traceback" not in server.log.read_text()
    spoil_all(node)
    # The control: without verification zeros change the answers.
    with serving(model, tmp_path / "control.log", node) as (server, engine):
        _until_connected(server, engine)
        assert all(answer != right for answer, right in zip(engine.generate(PROMPTS), expected, strict=True))
    with serving(model, tmp_path / "verifies.log", node, verify=True) as (server, engine):
        _until_connected(server, engine)
        assert engine.generate(PROMPTS) == expected
        assert counts(server)["loads_failed"] > 0


def _until_connected(server: LMCacheServer, engine: Engine) -> None:
    until = time.monotonic() + TIMEOUT_S
    seed = 100
    while not counts(server)["connected"]:
        assert time.monotonic() < until, server.log.read_text()[-4000:]
        engine.generate([prompt(300, seed)], 1)
        seed += 1
