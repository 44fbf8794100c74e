"""Kept memory where it meets the disk tier, the cold tier, orders of operators and answers that are late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT_S, Prompt, read, total, wait_until
from tests.robustness.test_kept_memory import back, begin, held, kept_by
from tests.server.cold.test_live import filled, ready, wait_journal
from tests.server.disk.test_live import store
from tokenlake.errors import Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.lease import Lease
from tokenlake_operator.evict import evict
from tokenlake_server import keeper
from tokenlake_testing.cluster import Node
from tokenlake_testing.disk_keys import keys_on_disk

pytestmark = pytest.mark.live

SEGMENTS = 12


def on_disk_alone(pool: Pool, prompts: list[Prompt]) -> tuple[Prompt, int, Lease]:
    """A prompt, and a lease of one of its segments that is on disk and not in memory."""
    for prompt in prompts:
        for index, key in enumerate(pool.prefix(prompt.tokens).keys):
            lease = pool.match([key], deadline_s=PATIENT_S)
            if lease.hits and lease.codes[0] == Code.REMOTE:
                return prompt, index, lease
            lease.release()
    raise AssertionError("all segments are in memory")


def test_an_answer_of_a_daemon_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon answers a fetch and dies, and the next one has its memory and reuses the slots before the thread of the
    engine goes on: it must not take the slots for those of its segments."""
    with kept_by("keeper", disk=str(tmp_path), disk_writes_per_day="0") as cluster:
        node = cluster.nodes[0]
        wait_until(lambda: total(node, "tokenlake_disk_serving") == 1, "the disk is in use")
        with cluster.connect(0, LAYOUT) as pool:
            prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
            for prompt in prompts:
                store(pool, prompt)
            wait_until(lambda: len(keys_on_disk(tmp_path)) > 100, "some are on disk")
            prompt, index, lease = on_disk_alone(pool, prompts)
            fetch = Lease._fetch

            def late(self: Lease, *arguments: Any) -> Any:
                answer = fetch(self, *arguments)
                monkeypatch.setattr(Lease, "_fetch", fetch)
                node.kill()
                begin(cluster)
                back(pool)
                wait_until(lambda: total(node, "tokenlake_survivors") == 0, "the engine has returned")
                wait_until(lambda: not withheld(node), "slots are reused")
                for seed in range(60):
                    store(pool, Prompt(5000 + seed, SEGMENTS))
                return answer

            monkeypatch.setattr(Lease, "_fetch", late)
            try:
                arrays = lease.fetch(deadline_s=LIMIT_S)
            except Unreachable:
                arrays = []
            assert prompt.wrong(arrays, index) == 0
            del arrays
            lease.release()
            assert read(pool, prompt) >= 0


def withheld(node: Node) -> float:
    return total(node, "tokenlake_withheld_slots")


def test_memory_passes_on_with_the_end_of_the_process(tmp_path: Path) -> None:
    """A daemon that has left its memory and whose process has not ended, because a thread hangs in a read of a disk
    into a slot, still has it: the next daemon does not get it."""
    with kept_by("keeper") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, SEGMENTS))
        node.stop()
        node.start("tests.robustness.lingering_daemon")
        cluster.wait_ready()
        path = str(node.socket).replace(".sock", ".keeper")
        node.terminate()
        wait_until(lambda: "it has left, and stays" in node.log.read_text(), "it has left")
        assert busy(path)
        node.kill()
        wait_until(lambda: not busy(path), "its process has ended")
        begin(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            assert read(pool, Prompt(1, SEGMENTS)) == SEGMENTS


def busy(path: str) -> bool:
    """Does the keeper serve a daemon?"""
    sock = keeper.connect(path)
    assert sock is not None
    with sock:
        return keeper.receive(sock)[0] == b"busy"


@pytest.mark.parametrize("what", ["segments", "tenant"])
def test_what_an_operator_evicted_stays_away(tmp_path: Path, what: str) -> None:
    """From memory, disk and a slow cold tier; the daemon is killed when the operator has the answer."""
    place, disk = tmp_path / "cold", tmp_path / "disk"
    place.mkdir()
    disk.mkdir()
    prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
    with kept_by("keeper", cold=str(place), disk=str(disk), disk_writes_per_day="0") as cluster:
        node = cluster.nodes[0]
        node.kill()
        node.start("tests.robustness.slow_cold_daemon")
        cluster.wait_ready()
        filled(cluster, prompts)
        wait_journal(place)
        with cluster.connect(0, LAYOUT) as pool:
            keys = [key for prompt in prompts[:10] for key in pool.prefix(prompt.tokens).keys]
        words = (
            [word for key in keys for word in ("--segment", key.hex())] if what == "segments" else ["--all", "--yes"]
        )
        at = ("--socket", str(node.socket).removesuffix(".sock") + ".control")
        assert CliRunner().invoke(evict, [*words, *at]).exit_code == 0
        node.kill()
        begin(cluster)
        ready(cluster)
        wait_until(lambda: total(node, "tokenlake_disk_serving") == 1, "the disk is in use")
        with cluster.connect(0, LAYOUT) as pool:
            assert found_of(pool, keys) == 0
            others = [key for prompt in prompts[10:] for key in pool.prefix(prompt.tokens).keys]
            assert (found_of(pool, others) > 0) == (what == "segments")


def found_of(pool: Pool, keys: list[SegmentKey]) -> int:
    """The number of these segments that the pool has anywhere."""
    found = 0
    for key in keys:
        with pool.match([key], deadline_s=PATIENT_S) as lease:
            found += lease.hits
    return found


def test_memory_that_missed_an_eviction() -> None:
    """A daemon was killed. The next one could not get its memory, and an operator evicted there what it had."""
    with kept_by("keeper") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, SEGMENTS))
        node.kill()
        keep = node.settings.pop("keep-s")
        with held(node):
            begin(cluster)
            at = ("--socket", str(node.socket).removesuffix(".sock") + ".control")
            assert CliRunner().invoke(evict, ["--all", "--yes", *at]).exit_code == 0
            node.stop()
        node.settings["keep-s"] = keep
        begin(cluster)
        assert "an operator has evicted segments" in node.log.read_text()
        with cluster.connect(0, LAYOUT) as pool:
            assert read(pool, Prompt(1, SEGMENTS)) == 0
            store(pool, Prompt(2, SEGMENTS))
            assert CliRunner().invoke(evict, ["--all", "--yes", *at]).exit_code == 0
            store(pool, Prompt(3, SEGMENTS))
        node.kill()
        begin(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            assert read(pool, Prompt(2, SEGMENTS)) == 0
            assert read(pool, Prompt(3, SEGMENTS)) == SEGMENTS, "memory that has followed it is kept"
