"""LMCache's server with an adapter whose client fails: hundreds of seeded faults change no token of the engine behind
it, end nothing, and leave no lease and no write at the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.faults import environment, nothing_left, quiet, recorded
from tests.engines.lmcache.test_servers import cluster, counts, model, serving
from tests.engines.vllm.conftest import prompt
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

__all__ = ["cluster", "model"]

FAULTS = 300
SEED = 31
PROMPTS = [prompt(600 + 30 * number, 60 + number) for number in range(24)]
MEMORY_MIB = 16
"""Less than the objects of the prompts, so that they come from the pool."""
SETTINGS = {"verify": True, "match_ms": 100, "call_ms": 200, "fetch_ms": 200, "write_patience_s": 0.05, "lease_s": 2}


def test_faults_reach_no_request(
    model: Path, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.nodes[0]
    for name, value in environment(tmp_path, SEED).items():
        monkeypatch.setenv(name, value)
    module = "tests.engines.lmcache.faulty"
    with serving(
        model, tmp_path / "log", node, module=module, memory_mib=MEMORY_MIB, prefix_caching=False, **SETTINGS
    ) as (server, engine):
        # The first answer to a prompt is computed: nothing is in any cache.
        expected = [engine.generate([tokens])[0] for tokens in PROMPTS]
        requests = 0
        while (faults := recorded(tmp_path)).total() < FAULTS:
            for tokens, right in zip(PROMPTS, expected, strict=True):
                assert engine.generate([tokens])[0] == right, server.log.read_text()[-4000:]
            requests += len(PROMPTS)
        print(f"seed {SEED}: {faults.total()} faults of {len(faults)} kinds in {requests} requests")
        assert any(name.startswith("call ") for name in faults)
        assert any(name.startswith("message ") for name in faults)
        found = counts(server)
        assert found["tokens_loaded"] > 0
        assert found["is_healthy"]
        quiet(tmp_path)
        for tokens, right in zip(PROMPTS[:2], expected[:2], strict=True):
            assert engine.generate([tokens])[0] == right
        nothing_left(node)
        assert "Traceback" not in server.log.read_text()
