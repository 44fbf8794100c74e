"""LMCache's server with an adapter whose client fails: hundreds of seeded faults change no token of the engine behind
it, end nothing, and leave no lease and no write at the daemon."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.engines.faults import environment, nothing_left, quiet, recorded
from tests.engines.vllm.conftest import TINY, prompt
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.lmcache_server import LMCACHE, LMCacheServer
from tokenlake_testing.tiny_model import save_tiny_model

if not (LMCACHE / "lmcache").is_dir():
    pytest.skip("LMCache is not installed (`make install-lmcache`)", allow_module_level=True)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

FAULTS = 300
SEED = 31
CHUNK = 256
PROMPTS = [prompt(600 + 30 * number, 60 + number) for number in range(24)]
SETTINGS: dict[str, Any] = {
    "engine": "vllm float32",
    "verify": True,
    "match_ms": 100,
    "call_ms": 200,
    "fetch_ms": 200,
    "write_patience_s": 0.05,
    "lease_s": 2,
}


def test_faults_reach_no_request(tmp_path: Path) -> None:
    plugin: dict[str, Any] = {
        "type": "plugin",
        "module_path": "tests.engines.lmcache.faulty",
        "class_name": "TokenLakeL2",
    }
    with Cluster(1, "128MiB", "16MiB") as cluster:
        plugin["adapter_params"] = {"socket": str(cluster.nodes[0].socket), **SETTINGS}
        with LMCacheServer(sys.executable, 256, CHUNK, l2=plugin, environment=environment(tmp_path, SEED)) as server:
            model = save_tiny_model(tmp_path / "model", TINY)
            # Without a cache of its own, which vLLM does not empty while blocks of a request are being stored.
            own: dict[str, Any] = {"environment": server.environment, "enable_prefix_caching": False}
            engine = Engine(model, tmp_path / "log", transfer=server.transfer, **own)
            try:
                check(server, engine, tmp_path)
                nothing_left(cluster.nodes[0])
            finally:
                engine.close()
            assert "Traceback" not in server.log.read_text()


def check(server: LMCacheServer, engine: Engine, directory: Path) -> None:
    """Serve prompts until there were enough faults."""
    # The first answer to a prompt is computed: nothing is in any cache.
    expected = [engine.generate([tokens])[0] for tokens in PROMPTS]
    server.hide_memory()
    requests = cached = 0
    while (faults := recorded(directory)).total() < FAULTS:
        for tokens, right in zip(PROMPTS, expected, strict=True):
            cached += ask(server, engine, tokens, right)
        requests += len(PROMPTS)
    print(f"seed {SEED}: {faults.total()} faults of {len(faults)} kinds in {requests} requests")
    assert any(name.startswith("call ") for name in faults)
    assert any(name.startswith("message ") for name in faults)
    assert cached > 0
    quiet(directory)
    for tokens, right in zip(PROMPTS[:2], expected[:2], strict=True):
        ask(server, engine, tokens, right)


def ask(server: LMCacheServer, engine: Engine, tokens: list[int], right: list[int]) -> int:
    """Ask with an empty cache of LMCache's server. Returns the tokens that came from the pool."""
    server.clear()
    answer = engine.timed([tokens])
    assert answer.tokens == [right], server.log.read_text()[-4000:]
    return answer.cached
