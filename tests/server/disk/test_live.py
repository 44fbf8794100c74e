"""Daemons with a disk: what they stored comes back after SIGTERM and kill -9, with the same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, outcomes, read, total, wait_until
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SEGMENTS = 12
KEY = os.urandom(32).hex()


def store(pool: Pool, prompt: Prompt) -> None:
    assert outcomes(pool.store_all(pool.prefix(prompt.tokens).keys, prompt.fill, patience=10.0)) <= {
        Code.COMMITTED,
        Code.EXISTS,
        Code.NOT_ADMITTED,
    }


def recovered(cluster: Cluster) -> None:
    for node in cluster.nodes:
        wait_until(lambda: total(node, "tokenlake_disk_serving") == 1, "the disk is in use")  # noqa: B023


def test_memory_is_written_out_at_the_end(tmp_path: Path) -> None:
    prompts = [Prompt(seed, SEGMENTS) for seed in range(5)]
    with daemons(disk=str(tmp_path)) as cluster:
        recovered(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                store(pool, prompt)
        cluster.nodes[0].stop()
        cluster.nodes[0].start()
        cluster.wait_ready()
        recovered(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                wait_until(lambda: read(pool, prompt) == SEGMENTS, "all segments come back")  # noqa: B023
        health = json.loads(cluster.nodes[0].page("/health"))
        assert health["disks"][0]["path"] == str(tmp_path)
        assert health["disks"][0]["serving"] is True


def test_nothing_is_written_out_where_the_switch_is_off(tmp_path: Path) -> None:
    prompt = Prompt(1, SEGMENTS)
    with daemons(disk=str(tmp_path), disk_save_s="0") as cluster:
        recovered(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
        cluster.nodes[0].stop()
        cluster.nodes[0].start()
        cluster.wait_ready()
        recovered(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            assert read(pool, prompt) == 0


@pytest.mark.parametrize("key", ["", KEY], ids=["plain", "encrypted"])
def test_segments_on_disk_outlive_a_kill(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds a third of the prompts. What is on disk when the daemon is killed is found by it and by another
    node, with the same bytes."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
    if key:
        monkeypatch.setenv("TOKENLAKE_DISK_KEYS", key)
    with daemons(disk=str(tmp_path), memory="4MiB") as cluster:
        node = cluster.nodes[0]
        recovered(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                store(pool, prompt)
            wait_until(lambda: total(node, "tokenlake_disk_written_segments_total") > 200, "segments are on disk")
            before = sum(read(pool, prompt) for prompt in prompts)
        for _ in range(3):
            node.kill()
            written = _segments(tmp_path)
            node.start()
            cluster.wait_ready()
            recovered(cluster)
            with cluster.connect(0, LAYOUT) as pool:
                found = sum(read(pool, prompt) for prompt in prompts)
                assert found > 0
                for prompt in prompts:
                    store(pool, prompt)
            assert written > 100
        assert before > 0
    data = b"".join(each.read_bytes() for each in tmp_path.glob("slab-*"))
    plain = any(prompt.content(0)[:64] in data for prompt in prompts)
    assert plain == (not key)


def _segments(path: Path) -> int:
    from tokenlake_server.disk.files import DirectoryFiles
    from tokenlake_server.disk.store import survey

    files = DirectoryFiles(path)
    try:
        return sum(len(each.stored) for each in survey(files))
    finally:
        files.close()
