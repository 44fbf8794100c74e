"""What operators see of vLLM: one engine with its processes, and one that the daemon refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import PATIENT, prompt
from tests.robustness.live import wait_until
from tests.server.control.scene import local
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TENANT = """
[[tenants]]
name = "red"
secret = "{secret}"
tokens = ["red-token-0123456789"]
"""


def test_one_server_is_one_engine(start: Callable[..., Engine], plain: Engine, tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text(f"allow_uids = [{os.getuid()}]\n" + TENANT.format(secret="aa" * 32))
    file.chmod(0o600)
    tokens = prompt(700, 81)
    with Cluster(1, "64MiB", "16MiB", config=str(file)) as cluster, local(cluster.nodes[0]) as control:
        pool = {"socket": str(cluster.nodes[0].socket), **PATIENT}
        engine = start({**pool, "credential": "red-token-0123456789"})
        assert engine.generate([tokens]) == plain.generate([tokens])
        assert engine.call("flush")
        wait_until(lambda: (control.status().engines, control.status().processes) == (1, 2), "a scheduler and a rank")
        assert [(each.engines, each.processes) for each in control.engines()] == [(1, 2)]
        assert list(control.status().refused) == []
        refused = start({**pool, "credential": "another-token-0123456789"})
        assert refused.generate([tokens]) == plain.generate([tokens])
        (found,) = control.status().refused
        assert (found.reason, found.uid) == ("token", os.getuid())
        assert (control.status().engines, control.status().processes) == (1, 2)
        refused.close()
        wait_until(lambda: not control.status().refused, "it has ended")
        engine.close()
        wait_until(lambda: (control.status().engines, control.status().processes) == (0, 0), "it has ended")
