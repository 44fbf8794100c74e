"""What starts: a wrong setting and an engine whose requests a lost segment would end do not; an engine whose tokens the
pool would change, or that the daemon refuses, starts without the pool. Installing the client changes none of vLLM's
packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import pool_of, prompt
from tests.engines.vllm.forked import ForkedEngine, answers, refusals
from tests.robustness.live import wait_until
from tests.server.control.scene import local
from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_client.engines.vllm import TokenLakeConnector
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine
from tokenlake_testing.families import save_latent, save_mistral
from tokenlake_testing.vllm_engine import transfer_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPTS = [prompt(700, 1), prompt(300, 2)]
DECLINED = 'tokenlake_refused_engines_total{reason="declined"}'
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def test_no_version_changed() -> None:
    lines = Path(sys.prefix, "before-the-client.txt").read_text().splitlines()
    # Where the client is installed anew, the list names its earlier commit.
    before = [line for line in lines if not line.startswith("-e ")]
    command = [sys.executable, "-m", "pip", "freeze"]
    now = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(before) > 50
    assert sorted(set(before) - set(now)) == []


def test_settings_are_checked_before_the_model_is_loaded() -> None:
    """vLLM's front-end process calls this class method where CUDA graphs are in use."""
    assert not TokenLakeConnector.requires_piecewise_for_cudagraph({"socket": "/s"})
    with pytest.raises(ConfigurationError, match="did you mean 'socket'"):
        TokenLakeConnector.requires_piecewise_for_cudagraph({"sokcet": "/s"})


def test_an_invalid_setting_ends_the_start(model: Path, tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{"sokcet": "/s"}, {"segment_tokens": 100}]
    engines = [ForkedEngine(model, tmp_path / f"{number}", each) for number, each in enumerate(settings)]
    errors = (
        "unknown setting 'sokcet' .*did you mean 'socket'",
        "setting 'segment_tokens' is 100; expected a multiple of vLLM's block size",
    )
    for engine, error in zip(engines, errors, strict=True):
        with pytest.raises(Unreachable, match=error):
            engine.generate(PROMPTS)
        engine.close()


def within(cluster: Cluster) -> list[dict[str, Any]]:
    """The settings of a `MultiConnector` with our connector alone, which verifies its reads."""
    return [pool_of(cluster.nodes[0], verify=True)]


def test_a_wrapper_without_the_policy_is_refused(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    refused = ForkedEngine(model, tmp_path / "refused.log", within(cluster))
    # The line within "connectors" does not reach vLLM's scheduler.
    (misplaced,) = transfer_of(within(cluster))["kv_connector_extra_config"]["connectors"]
    misplaced["kv_load_failure_policy"] = "recompute"
    extra = {"kv_connector_extra_config": {"connectors": [misplaced]}}
    refused_too = ForkedEngine(model, tmp_path / "misplaced.log", within(cluster), transfer=extra)
    # Of a model whose layout the pool does not know.
    opaque = ForkedEngine(model, tmp_path / "opaque.log", within(cluster), speculative_config=GUESSING)
    for engine in (refused, refused_too, opaque):
        with pytest.raises(Unreachable, match="setting 'kv_load_failure_policy' is 'fail'") as raised:
            answers(engine, PROMPTS)
        assert 'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config' in str(raised.value)


Save = Callable[[Path], Path]
UNSERVED: dict[str, tuple[Save, dict[str, Any], str]] = {
    # vLLM's CPU kernels of latent attention; with `serve_inexact`, `test_opaque` runs them.
    "inexact": (save_latent, {"attention_backend": "CPU_MLA"}, "latent attention on vLLM's CPU kernels"),
    "weak hash": (save_mistral, {"prefix_caching_hash_algo": "xxhash"}, "'prefix_caching_hash_algo' is 'xxhash'"),
    "no weights": (save_mistral, {"load_format": "dummy"}, "'load_format' is 'dummy'"),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_the_pool_cannot_serve_goes_without_it(cluster: Cluster, tmp_path: Path, case: str) -> None:
    """Operators of the daemon see it too."""
    save, arguments, reason = UNSERVED[case]
    before = cluster.nodes[0].metrics()
    engine = ForkedEngine(save(tmp_path / "model"), tmp_path / "log", pool_of(cluster.nodes[0]), **arguments)
    (first, *_), (again, *_) = answers(engine, PROMPTS)
    # Those kernels round by what vLLM batches together: two answers without a pool may differ too.
    assert first == again or case == "inexact"
    after = cluster.nodes[0].metrics()
    asked = "tokenlake_match_requests_total"
    assert (after[asked], after[DECLINED]) == (before[asked], before[DECLINED] + 1)
    (said,) = refusals(engine)
    assert reason in said
    assert said in cluster.nodes[0].log.read_text()


TENANT = """
[[tenants]]
name = "red"
secret = "{secret}"
tokens = ["red-token-0123456789"]
"""


def test_an_operator_sees_one_engine_and_a_refused_one(
    start: Callable[..., Engine], plain: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text(f"allow_uids = [{os.getuid()}]\n" + TENANT.format(secret="aa" * 32))
    file.chmod(0o600)
    tokens = prompt(700, 81)
    with Cluster(1, "64MiB", "16MiB", config=str(file)) as cluster, local(cluster.nodes[0]) as control:
        pool = pool_of(cluster.nodes[0])
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
