"""The commands of an operator beside daemons that serve engines: what they print is what the daemons have."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.operator.scene import control_of, run, told
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    SEGMENT_TOKENS,
    Prompt,
    daemons,
    match,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tests.server.certified import encrypted
from tokenlake.wire import engine
from tokenlake_client import MatchOptions
from tokenlake_operator.events import events
from tokenlake_operator.evict import evict
from tokenlake_operator.explain import explain
from tokenlake_operator.members import members
from tokenlake_operator.status import status
from tokenlake_operator.top import top
from tokenlake_operator.words import span
from tokenlake_server.disk.directory import FORMAT, Identity, pack_identity
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with daemons(2, memory="8MiB") as cluster:
        yield cluster


def test_the_status_of_a_cluster(two: Cluster) -> None:
    prompt = Prompt(1, 4)
    with two.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        wait_told(two)
        assert read(pool, prompt) == 4
        answer = told(status, "--socket", control_of(two.nodes[0]))
        assert [each["node"] for each in answer["cluster"]["members"]] == ["node0", "node1"]
        own = answer["nodes"]["node0"]
        assert own["counters"]["tokenlake_stored_segments_total"] >= 4
        assert own["engines"] == 1
        assert answer["nodes"]["node1"]["memory_bytes"] == 8 << 20
        assert (answer["findings"], answer["not_asked"]) == ([], {})
        lines = run(status, "--socket", control_of(two.nodes[0])).stdout.splitlines()
        assert lines[0] == "cluster tokenlake: 2 nodes, epoch 0"
        row = next(line for line in lines if line.startswith("node0"))
        assert re.search(r"up\s+8\.0 MiB\s+\d", row), row
        assert lines[-1] == "no problem was found"


def test_nodes_that_listen_on_all_interfaces_and_advertise_one() -> None:
    """With static peers: the entry of a node in `peers` is the address that it advertises."""
    cluster = encrypted(2, memory="8MiB")
    for node, port in zip(cluster.nodes, cluster.ports.values(), strict=True):
        node.settings |= {"listen": f"0.0.0.0:{port}", "advertise": f"127.0.0.1:{port}"}
    prompt = Prompt(3, 4)
    with cluster, cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        store(pool, prompt)
        wait_told(cluster)
        assert read(other, prompt) == 4
        report = told(status, "--socket", control_of(cluster.nodes[0]))
        assert (sorted(report["nodes"]), report["findings"]) == (["node0", "node1"], [])


def test_problems_have_cures() -> None:
    with daemons(2) as cluster:
        cluster.nodes[1].kill()
        place = control_of(cluster.nodes[0])

        def noticed() -> bool:
            return bool(told(status, "--socket", place)["findings"])

        wait_until(noticed, "the end of node1")
        control_of(cluster.nodes[1]).unlink()
        lines = run(status, "--socket", place).stdout
        assert "start the daemon of 'node1'" in lines
        assert "node1 was not asked: it is not connected with 'node0'" in lines
        assert re.search(r"node1\s+not connected", lines)


def test_disks_that_serve_and_one_that_is_set_aside(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for directory in (good, bad):
        directory.mkdir(0o700)
    identity = Identity(format=FORMAT, cluster="tokenlake", node="node0", device="d", encrypted=True)
    (bad / "tokenlake-disk.json").write_bytes(pack_identity(identity))
    with daemons(disk=f"{good}:64MiB,{bad}:64MiB", disk_writes_per_day="0") as cluster:
        node = cluster.nodes[0]
        place = control_of(node)
        with cluster.connect(0, LAYOUT) as pool:
            wait_until(lambda: total(node, "tokenlake_disk_serving") == 1, "one disk is in use")
            for seed in range(60):
                prompt = Prompt(seed, 12)
                pool.store_all(pool.prefix(prompt.tokens).keys, prompt.fill, patience=LIMIT_S)
            wait_until(lambda: total(node, "tokenlake_disk_segments") > 20, "some segments are on disk")

        def disks() -> Any:
            return told(status, "--socket", place)["nodes"]["node0"]["disks"]

        wait_until(lambda: disks()[1]["problem"], "the other disk is set aside")
        (first, second), findings = disks(), told(status, "--socket", place)["findings"]
        assert (first["path"], first["serving"], second["serving"]) == (str(good), True, False)
        # Further segments may be written between the two looks.
        wait_until(lambda: disks()[0]["segments"] == total(node, "tokenlake_disk_segments"), "both count the same")
        wait_until(lambda: disks()[0]["used_bytes"] == total(node, "tokenlake_disk_used_bytes"), "and the same bytes")
        assert 0 < first["used_bytes"] <= first["capacity_bytes"] <= 64 << 20
        (finding,) = (each for each in findings if each["check"] == "disk-set-aside")
        assert finding["where"] == f"node0, {bad}"
        assert "'disk_keys' is empty" in finding["problem"]
        lines = run(status, "--socket", place).stdout
        assert re.search(rf"node0\s+{good}\s+serving\s+60\.0 MiB\s+[\d.]+ %\s+\d+", lines)
        assert re.search(rf"node0\s+{bad}\s+set aside", lines)


def test_top_shows_rates_prefixes_and_slow_calls(two: Cluster) -> None:
    shared = Prompt(10, 3)
    stop = threading.Event()

    def work() -> None:
        with two.connect(0, LAYOUT) as pool:
            store(pool, shared)
            number = 0
            while not stop.is_set():
                keys = pool.prefix(shared.tokens).keys
                with pool.match(keys, MatchOptions(request=f"chat-{number}")) as lease:
                    lease.fetch()
                number += 1
                time.sleep(0.01)

    working = threading.Thread(target=work)
    working.start()
    try:
        wait_until(lambda: bool(told(top, "--once", "--interval", "0.2", *at(two))["prefixes"]), "requests are seen")
        screen = told(top, "--once", "--interval", "1", *at(two))
        lines = run(top, "--once", "--interval", "0.2", *at(two)).stdout
    finally:
        stop.set()
        working.join()
    node0, node1 = screen["nodes"]
    assert (node0["node"], node1["node"]) == ("node0", "node1")
    assert node0["matches_per_s"] > 1
    assert (node0["supplied_share"], node0["engine_had_share"], node0["missed_share"]) == (1.0, 0.0, 0.0)
    assert node0["asked_tokens_per_s"] >= 3 * SEGMENT_TOKENS
    assert node1["matches_per_s"] == 0
    (tenant,) = screen["tenants"]
    assert (tenant["tenant"], tenant["segments"] >= 3) == ("default", True)
    assert tenant["read_bytes_per_s"] > 0
    with two.connect(0, LAYOUT) as pool:
        first = pool.prefix(shared.tokens).keys[0].hex()
    hot = screen["prefixes"][0]
    assert (hot["key"], hot["nodes"]) == (first, ["node0"])
    assert hot["requests"] > 1
    assert hot["supplied_tokens"] > 0
    assert hot["newest"].startswith("chat-")
    assert all(call["call"] in ("match", "fetch") and call["seconds"] >= 0 for call in screen["calls"])
    assert "hot prefixes" in lines
    assert first[:16] in lines


def test_the_slowest_call_is_named(two: Cluster) -> None:
    """A match that waits for a segment that no engine writes is slower than all others."""
    with two.connect(1, LAYOUT) as pool, two.connect(1, LAYOUT) as other:
        keys = pool.prefix(Prompt(11, 2).tokens).keys
        other.engine.mark_in_flight(keys, 10.0)
        waiting = MatchOptions(request="slow one", in_flight_wait_s=0.4)
        # The daemon has the marker.
        other.link.call(engine.Heartbeat, engine.HeartbeatReply)
        pool.match(keys, waiting).release()
        screen = told(top, "--once", "--interval", "0.2", *at(two))
    slowest = screen["calls"][0]
    assert (slowest["request"], slowest["call"], slowest["node"]) == ("slow one", "match", "node1")
    assert 0.3 < slowest["seconds"] < 10


def at(cluster: Cluster, number: int = 0) -> tuple[str, str]:
    return "--socket", str(control_of(cluster.nodes[number]))


def test_evictions(two: Cluster) -> None:
    first, second = Prompt(20, 3), Prompt(21, 3)
    with two.connect(0, LAYOUT) as pool:
        store(pool, first)
        store(pool, second)
        keys = pool.prefix(first.tokens).keys
        answer = told(evict, "--segment", keys[1].hex(), "--segment", keys[2].hex(), *at(two))
        assert answer == {"evicted": {"node0": 2}, "unremoved": {}, "failed": {}}
        with match(pool, first) as lease:
            assert lease.hits == 1
        size = f"{LAYOUT.segment_bytes // 1024}KiB"
        assert told(evict, "--segment-bytes", size, "--yes", *at(two))["evicted"]["node0"] >= 4
        with match(pool, second) as lease:
            assert lease.hits == 0
        store(pool, second)
        result = run(evict, "--all", "--everywhere", *at(two))
        assert (result.exit_code, "--yes" in result.stderr) == (1, True)
        assert told(evict, "--all", "--everywhere", "--yes", *at(two))["evicted"].keys() == {"node0", "node1"}
        assert read(pool, second) == 0
        store(pool, first)
        lines = run(evict, "--segment", keys[2].hex(), *at(two)).stdout
        assert lines == "node0: 1 segment evicted\n"
        assert told(evict, "--segment-bytes", size, "--yes", *at(two))["evicted"] == {"node0": 2}
        unknown = run(evict, "--all", "--tenant", "rde", *at(two))
        assert unknown.stderr == "Error: there is no tenant 'rde'; expected one of default\n"
        assert "is no size; expected a size such as" in run(evict, "--segment-bytes", "x", *at(two)).stderr
    for words in ((), ("--all", "--segment-bytes", "1"), ("--segment", "zz"), ("--segment", "ab")):
        assert run(evict, *words, *at(two)).exit_code == 2


def test_events_as_they_happen(two: Cluster) -> None:
    with two.connect(0, LAYOUT) as pool, ThreadPoolExecutor(1) as threads:
        reading, number = threads.submit(run, events, "--count", "3", "--json", *at(two)), 100
        while not reading.done():
            # Changes before the stream began are no changes: prompts are stored until some are seen.
            store(pool, Prompt(number, 1))
            number += 1
        lines = [json.loads(line) for line in reading.result().stdout.splitlines()]
        assert [(each["what"], each["node"]) for each in lines] == [("stored", "node0")] * 3
        snapshot = run(events, "--snapshot", "--json", *at(two)).stdout.splitlines()
        assert {each["key"] for each in lines} <= {json.loads(line)["key"] for line in snapshot}
        told(evict, "--segment", lines[0]["key"], *at(two))
        cursor, one = lines[-1]["cursor"], ("--count", "1", *at(two))
        while (change := json.loads(run(events, "--after", cursor, "--json", *one).stdout))["what"] == "stored":
            cursor = change["cursor"]
        assert (change["what"], change["key"]) == ("gone", lines[0]["key"])
        assert run(events, "--after", cursor, *one).stdout.startswith("gone ")
    assert run(events, "--after", "x", *at(two)).exit_code == 2
    lost = run(events, "--after", "1.1", *at(two))
    assert (lost.exit_code, "take a snapshot" in lost.stderr) == (1, True)


def test_explain_as_the_operator(two: Cluster) -> None:
    prompt = Prompt(40, 2)
    with two.connect(0, LAYOUT) as pool:
        pool.match(pool.prefix(prompt.tokens).keys, MatchOptions(request="asked-1")).release()
    by_operator = told(explain, "asked-1", "--tenant", "default", *at(two))
    by_user = told(explain, "asked-1", "--socket", two.nodes[0].socket)
    for each in (by_operator, by_user):
        each.pop("age_s")
    assert by_operator == by_user
    assert by_operator["ideal"] == 2 * SEGMENT_TOKENS
    assert run(explain, "nothing", "--tenant", "default", *at(two)).exit_code == 1
    empty = run(explain, "", *at(two))
    assert (empty.exit_code, "REQUEST_ID is empty" in empty.stderr) == (2, True)


def test_members_of_a_file_and_of_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('node = "a"\npeers = ["a=127.0.0.1:7440", "b=127.0.0.1:7450"]\n')
    answer = told(members, "--config", file)
    assert (answer["cluster"], answer["members"].keys()) == ("tokenlake", {"a", "b"})
    assert run(members, "--config", file).stderr == ""
    assert "--config names the file" in run(members).stderr


def test_spans_are_rounded_to_the_next_unit() -> None:
    seconds = (0.00034, 0.0009999999, 0.99999, 119.99, 3600)
    assert list(map(span, seconds)) == ["340 us", "1.0 ms", "1.0 s", "2 min", "60 min"]
