"""A real engine of SGLang whose client fails: hundreds of seeded faults in its scheduler's process change no token, end
nothing, and leave no lease and no write at the daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.faults import environment, nothing_left, quiet, recorded
from tests.engines.sglang.conftest import counts_of, forget, pool_of, prompt, tracebacks
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

FAULTS = 300
SEED = 29
PROMPTS = [prompt(300 + 40 * number, 60 + number) for number in range(12)]
SETTINGS = {"verify": True, "match_ms": 100, "call_ms": 200, "fetch_ms": 200, "write_patience_s": 0.05, "lease_s": 2}


def test_faults_reach_no_request(
    start: Callable[..., Engine], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.nodes[0]
    plain = start()
    for name, value in environment(tmp_path, SEED).items():
        monkeypatch.setenv(name, value)
    faulty = start(pool_of(node, **SETTINGS, module_path="tests.engines.sglang.faulty"), enable_metrics=True)
    expected = [plain.generate([tokens])[0] for tokens in PROMPTS]
    requests = 0
    while (faults := recorded(tmp_path)).total() < FAULTS:
        forget(faulty)
        assert faulty.generate(PROMPTS) == expected, faulty.log.read_text()[-4000:]
        requests += len(PROMPTS)
    print(f"seed {SEED}: {faults.total()} faults of {len(faults)} kinds in {requests} requests")
    assert any(name.startswith("call ") for name in faults)
    assert any(name.startswith("message ") for name in faults)
    assert counts_of(faulty)["loaded_tokens"] > 0
    quiet(tmp_path)
    forget(faulty)
    assert faulty.generate(PROMPTS[:1]) == expected[:1]
    nothing_left(node)
    assert tracebacks(faulty) == []
