"""The replay against real daemons finds no wrong byte, and detects them when the keys are too weak."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from numpy.typing import NDArray

from tests.robustness.live import PATIENT
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, root_key
from tokenlake_bench.cache_hit import FAST_DAEMON
from tokenlake_bench.cli import bench
from tokenlake_bench.live_client import LiveClient, Served, chain_of
from tokenlake_bench.sizing import bench_layout
from tokenlake_client import Pool
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl.zst"
SEGMENT = 64
LAYOUT = bench_layout(SEGMENT)
PUBLIC_SECRET = b"known to every tenant"

Connect = Callable[[int, str], Pool]
"""(node, credential)"""

TENANTS = """
cluster_secret = "cccccccccccccccccccccccccccccccc"

[[tenants]]
name = "a"
secret = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
tokens = ["token of a"]

[[tenants]]
name = "b"
secret = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
tokens = ["token of b"]
"""


def test_a_replay_has_no_wrong_byte_and_remote_hits(tmp_path: Path) -> None:
    result_file, plot = tmp_path / "result.json", tmp_path / "result.png"
    arguments = ["cache-hit", "--limit", "400", "--nodes", "3", "--json", str(result_file), "--plot", str(plot)]
    if TRACE.exists():
        arguments += ["--trace", str(TRACE)]
    outcome = CliRunner().invoke(bench, arguments)
    print(outcome.output)
    assert outcome.exit_code == 0, outcome.output
    assert TRACE.exists() or "built-in workload" in outcome.output
    result = json.loads(result_file.read_bytes())
    assert result["wrong_bytes"] == 0
    assert result["requests"] == 400
    assert 0 < result["token_hit_rate"] <= result["ideal_token_hit_rate"]
    assert 0 < result["private_token_hit_rate"] <= result["ideal_token_hit_rate"]
    assert 0 < result["remote_share"] < 1
    assert result["duplication"] >= 1
    assert result["load_max_over_mean"] >= 1
    assert result["bytes_moved"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.rest
def test_a_replay_with_disks(tmp_path: Path) -> None:
    """A replay with disks reads from them without a wrong byte."""
    result_file, disks = tmp_path / "result.json", tmp_path / "disks"
    disks.mkdir()
    arguments = ["cache-hit", "--limit", "200", "--nodes", "2", "--json", str(result_file), "--segment-tokens", "64"]
    arguments += ["--capacity-tokens", "8000", "--disk-tokens", "32000", "--disk-directory", str(disks)]
    outcome = CliRunner().invoke(bench, arguments)
    print(outcome.output)
    assert outcome.exit_code == 0, outcome.output
    assert "capacity of the disks" in outcome.output
    result = json.loads(result_file.read_bytes())
    assert result["wrong_bytes"] == 0
    assert 0 <= result["remote_share"] < 1
    disk = result["disk"]
    assert disk["tokens"] > 0
    assert disk["written_bytes_per_day"] > disk["written_bytes"] > 0
    assert 0 < disk["written_share"] < 1
    assert not list(disks.iterdir()), "the files of the disks are removed"


@pytest.mark.rest
def test_interrupted_it_writes_what_is_done(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["bench", "cache-hit", "--limit", "2000", "--json", str(result_file)]
    command = [sys.executable, "-c", "from tokenlake.command import main; main()", *arguments]
    with start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if "replaying: " in line:
                process.send_signal(signal.SIGINT)
                break
        output += process.stdout
    assert process.returncode == 0, "".join(output)
    result = json.loads(result_file.read_bytes())
    assert 0 < result["requests"] < 2000
    assert f"interrupted after {result['requests']:,} requests" in "".join(output)
    assert result["wrong_bytes"] == 0


def tokens(first: int, count: int) -> NDArray[np.uint32]:
    return np.arange(first, first + count, dtype=np.uint32)


def prompts() -> list[NDArray[np.uint32]]:
    """Prompts of one text behind two different first segments, each twice."""
    text = tokens(1000, 4 * SEGMENT)
    return [np.concatenate([tokens(first, SEGMENT), text]) for first in (0, 500, 0, 500)]


def serve_all(clients: Sequence[LiveClient], requests: Sequence[NDArray[np.uint32]]) -> list[Served]:
    return [clients[index % len(clients)].serve(each) for index, each in enumerate(requests)]


def without_parent(pool: Pool, text: NDArray[np.uint32]) -> list[SegmentKey]:
    """Each segment's key from its own tokens only."""
    size = pool.layout.segment_tokens
    pieces = [text[start : start + size] for start in range(0, len(text) - size + 1, size)]
    return [SegmentKey(hashlib.blake2b(piece.tobytes(), digest_size=32).digest()) for piece in pieces]


def without_secret(pool: Pool, text: NDArray[np.uint32]) -> list[SegmentKey]:
    """The project's chain, but from a root that all tenants share."""
    chain = Prefix(root_key(PUBLIC_SECRET, pool.layout.fingerprint()), pool.layout.segment_tokens)
    chain.extend(text)
    return chain.keys


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "tenants.toml"
    config.write_text(TENANTS)
    config.chmod(0o600)
    patient = {"match_deadline_ms": "2000", "suspect_ms": "10000"}
    with Cluster(2, "8MiB", "1MiB", config=str(config), **patient) as running:
        yield running


@pytest.fixture
def connect(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects with a layout of the test's own, so that it finds no segments of other tests."""
    layout = replace(LAYOUT, model_id=request.node.name)
    with contextlib.ExitStack() as stack:

        def open_pool(node: int, credential: str) -> Pool:
            socket = cluster.nodes[node].socket
            return stack.enter_context(Pool.connect(socket, layout, credential, deadlines=PATIENT))

        yield open_pool


def test_the_same_text_behind_another_prefix_is_another_segment(connect: Connect) -> None:
    clients = [LiveClient(connect(node, "token of a"), seed=1) for node in (0, 1)]
    served = serve_all(clients, prompts())
    assert [each.hits for each in served] == [0, 0, 5, 5]
    assert sum(each.wrong_bytes for each in served) == 0


def test_keys_without_the_parent_give_wrong_bytes(connect: Connect) -> None:
    clients = [LiveClient(connect(node, "token of a"), seed=1, chain=without_parent) for node in (0, 1)]
    served = serve_all(clients, [*prompts()[:2], tokens(1000, 4 * SEGMENT)])
    assert sum(each.wrong_bytes for each in served) > 0


def test_the_index_alone_separates_tenants(connect: Connect) -> None:
    clients = [LiveClient(connect(0, f"token of {tenant}"), seed=1, chain=without_secret) for tenant in "ab"]
    served = serve_all(clients, [prompts()[0]] * 4)
    assert served[0].keys == served[1].keys
    assert [each.hits for each in served] == [0, 0, 5, 5]
    assert sum(each.wrong_bytes for each in served) == 0


def test_without_tenants_in_keys_and_index_bytes_are_wrong(connect: Connect) -> None:
    # Both clients connect as tenant a, as if there were no tenants; each expects the bytes of its own tenant.
    clients = [LiveClient(connect(0, "token of a"), seed=1, tenant=tenant, chain=without_secret) for tenant in "ab"]
    served = serve_all(clients, [prompts()[0]] * 2)
    assert served[1].hits == served[1].wrong_segments == 5
    assert served[1].wrong_bytes > 0


def test_the_secret_alone_separates_tenants(connect: Connect) -> None:
    pools = [connect(0, f"token of {tenant}") for tenant in "ab"]
    keys = [chain_of(pool, prompts()[0]) for pool in pools]
    assert not set(keys[0]) & set(keys[1])


def test_a_session_survives_a_daemon_with_a_fast_clock() -> None:
    """Heartbeats are sent by the real clock; the lease ends by the daemon's clock."""
    speed, lease_s = 20.0, 60.0
    layout = bench_layout(16)
    fast = {"speed": str(speed), "lease_s": str(lease_s), "match_deadline_ms": "40000"}
    with Cluster(1, "8MiB", "1MiB", None, FAST_DAEMON, **fast) as running, running.connect(0, layout) as pool:
        assert pool.link.heartbeat_s == pytest.approx(lease_s / 3 / speed)
        session = pool.engine.session
        began = running.nodes[0].metrics()
        client = LiveClient(pool, seed=1, haste=speed)
        tokens = np.arange(160, dtype=np.uint32)
        until = time.monotonic() + 1.5 * lease_s / speed
        while time.monotonic() < until:
            served = client.serve(tokens)
        assert (served.hits, served.wrong_segments, served.failures) == (10, 0, 0)
        assert (pool.engine.session, pool.engine.expired) == (session, 0)
        assert began.keys() <= running.nodes[0].metrics().keys()
