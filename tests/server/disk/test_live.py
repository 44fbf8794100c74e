"""Daemons with a disk: what they stored comes back after SIGTERM and kill -9, with the same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    daemons,
    outcomes,
    read,
    total,
    wait_until,
)
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.disk_keys import keys_on_disk
from tokenlake_testing.event_log import replay

pytestmark = pytest.mark.live

SEGMENTS = 12


def store(pool: Pool, prompt: Prompt) -> None:
    codes = pool.store_all(pool.prefix(prompt.tokens).keys, prompt.fill, patience=LIMIT_S)
    assert outcomes(codes) <= {Code.COMMITTED, Code.EXISTS, Code.NOT_ADMITTED}


def read_each(pool: Pool, prompts: list[Prompt]) -> int:
    """Read each segment of the prompts by itself, and compare its bytes. Returns how many there are."""
    found = 0
    for prompt in prompts:
        for index, key in enumerate(pool.prefix(prompt.tokens).keys):
            with pool.match([key], deadline_s=PATIENT_S) as lease:
                arrays = lease.fetch(deadline_s=LIMIT_S)
                assert prompt.wrong(arrays, index) == 0, "wrong bytes"
                found += len(arrays)
    return found


def started(cluster: Cluster, **settings: str) -> None:
    """Start the first node if it does not run, and wait until its disk is in use."""
    node = cluster.nodes[0]
    if not node.running:
        node.start(**settings)
    cluster.wait_ready()
    wait_until(lambda: total(node, "tokenlake_disk_serving") == 1, "the disk is in use")


def test_memory_comes_back_after_sigterm(tmp_path: Path) -> None:
    """The segments are encrypted. Where `disk_save_s` is 0, memory is lost."""
    prompts, lost = [Prompt(seed, SEGMENTS) for seed in range(5)], Prompt(9, SEGMENTS)
    directory, file = tmp_path / "disk", tmp_path / "settings.toml"
    directory.mkdir()
    file.touch(0o600)
    file.write_text(f'disk_keys = ["{os.urandom(32).hex()}"]')
    with daemons(disk=str(directory), config=str(file), record=str(tmp_path / "events")) as cluster:
        node = cluster.nodes[0]
        started(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                store(pool, prompt)
        assert node.stop() == 0
        started(cluster, **{"disk-save-s": "0"})
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                wait_until(lambda: read(pool, prompt) == SEGMENTS, "all segments come back")  # noqa: B023
            store(pool, lost)
        health = json.loads(node.page("/health"))["disks"][0]
        assert (health["path"], health["serving"], health["problem"]) == (str(directory), True, "")
        assert node.stop() == 0
        started(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            for prompt in prompts:
                wait_until(lambda: read(pool, prompt) == SEGMENTS, "all segments come back")  # noqa: B023
            assert read(pool, lost) == 0
    assert not replay(tmp_path / "events").difference
    data = b"".join(each.read_bytes() for each in directory.iterdir())
    assert not any(prompt.content(0)[:64] in data for prompt in prompts)


def test_segments_on_disk_outlive_kills(tmp_path: Path) -> None:
    """Memory holds a third of the prompts. The engines of the node and of another one, which has no disk, find after
    each kill what was on disk."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
    with daemons(2) as cluster:
        node = cluster.nodes[0]
        node.stop()
        node.settings |= {"disk": str(tmp_path), "disk-writes-per-day": "0"}
        started(cluster)
        for reader in (0, 1):
            with cluster.connect(0, LAYOUT) as pool:
                for prompt in prompts:
                    store(pool, prompt)
                wait_until(lambda: len(keys_on_disk(tmp_path)) > 100, "some are on disk")
            cluster.nodes[1].stop()
            node.kill()
            on_disk = len(keys_on_disk(tmp_path))
            cluster.nodes[1].start()
            started(cluster)
            with cluster.connect(reader, LAYOUT) as pool:
                wait_until(lambda: read_each(pool, prompts) >= 0.99 * on_disk, "what was on disk")  # noqa: B023


def test_a_second_daemon_is_refused(tmp_path: Path) -> None:
    with daemons(disk=str(tmp_path)) as cluster:
        started(cluster)
        with pytest.raises(Exception, match="a directory that no other process uses; process [0-9]+ does"):
            daemons(disk=str(tmp_path)).__enter__()
