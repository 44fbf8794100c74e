"""The service `Admin` of a real daemon."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, read, store, total, wait_told
from tests.server.control.scene import local
from tokenlake.errors import LimitReached, MembershipRefused, Refused
from tokenlake.wire.funnel import MissReason
from tokenlake_client import MatchOptions
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        yield cluster


def test_the_status_is_that_of_the_metrics_page(two: Cluster) -> None:
    node = two.nodes[0]
    with two.connect(0, LAYOUT) as pool, local(node) as control:
        store(pool, Prompt(1, 3))
        wait_told(two)
        status = control.status()
        assert (status.node, status.cluster, status.membership.known) == ("node0", "tokenlake", True)
        assert status.memory_bytes == 4 << 20
        assert {peer.node: peer.state for peer in status.peers} == {"node1": "connected"}
        assert status.counters["tokenlake_match_requests_total"] == total(node, "tokenlake_match_requests_total")
        (slots,) = status.pools
        assert slots.segments["primary"] + slots.segments["cached"] == total(node, "tokenlake_segments")
        assert slots.free_slots == total(node, "tokenlake_free_slots")


def test_the_cluster_and_the_settings(two: Cluster) -> None:
    with local(two.nodes[1]) as control:
        cluster = control.cluster()
        assert [(each.node, each.draining, each.usable) for each in cluster.members] == [
            ("node0", False, True),
            ("node1", False, True),
        ]
        assert cluster.members[0].address == f"127.0.0.1:{two.ports['node0']}"
        settings = {each.name: (each.value, each.source) for each in control.config()}
        assert settings["memory"] == ("4MiB", "flag --memory")
        assert settings["drain_s"][1] == "default"
        assert settings["cluster_secret"][0] in ("", "***")


def test_eviction_by_prefix_size_and_tenant(two: Cluster) -> None:
    first, second = Prompt(31, 3), Prompt(32, 3)
    with two.connect(0, LAYOUT) as pool, local(two.nodes[0]) as control:
        control.evict(everything=True)
        store(pool, first)
        store(pool, second)
        keys = pool.prefix(first.tokens).keys
        assert control.evict(keys=keys[1:]).evicted == 2
        assert (read(pool, first), read(pool, second)) == (1, 3)
        pool.match(keys, MatchOptions(request="evicted"), deadline_s=2.0).release()
        reasons = {each.reason: each.detail for each in control.explain("evicted").funnel.missed}
        assert "an operator" in reasons[MissReason.EVICTED]
        assert control.evict(segment_bytes=LAYOUT.segment_bytes + 1).evicted == 0
        assert control.evict(segment_bytes=LAYOUT.segment_bytes).evicted == 4
        store(pool, second)
        assert control.evict(everything=True).evicted == 3
        assert read(pool, second) == 0
        arguments: list[dict[str, Any]] = [{}, {"keys": []}]
        for wrong in arguments:
            with pytest.raises(Refused, match="expected keys|one of the fields 'keys'"):
                control.evict(**wrong)
        with pytest.raises(LimitReached):
            control.evict(keys=[keys[0]] * 20_000)


def test_a_static_list_has_no_member_to_drain_or_remove(two: Cluster) -> None:
    with local(two.nodes[0]) as control:
        for node in ("", "node1"):
            with pytest.raises(MembershipRefused, match="set 'etcd'"):
                control.drain(node)
        with pytest.raises(MembershipRefused, match="set 'etcd'"):
            control.remove("node1")
        with pytest.raises(Refused, match="field 'node' is empty; expected the name of a node"):
            control.remove("")
    logged = two.nodes[0].log.read_text()
    user = f"uid {os.getuid()} ({pwd.getpwuid(os.getuid()).pw_name}) at the control socket"
    assert f"{user} called Drain(): failed: MembershipRefused: " in logged
    assert f"{user} called Drain(node=node1): failed: MembershipRefused: " in logged
    assert f"{user} called Remove(node=node1): failed: MembershipRefused: " in logged
    assert "called Remove(node=node1): done" not in logged


def test_the_engines_by_layout(two: Cluster) -> None:
    other = msgspec.structs.replace(LAYOUT, dtype="float16")
    with local(two.nodes[0]) as control, two.connect(0, LAYOUT), two.connect(0, LAYOUT), two.connect(0, other):
        found = {bytes(each.layout.fingerprint): (each.tenant, each.processes) for each in control.engines()}
        assert found == {LAYOUT.fingerprint(): ("default", 2), other.fingerprint(): ("default", 1)}


def test_a_measurement_is_bounded_and_reads_no_segment(two: Cluster) -> None:
    with local(two.nodes[0]) as control:
        before = control.status().counters
        (path,) = control.measure("node1", max_bytes=3 << 20)
        assert (path.problem, path.bytes) == ("", 3 << 20)
        assert path.address == f"127.0.0.1:{two.ports['node1']}"
        assert 0 < path.round_trip_s < 5
        (timed,) = control.measure("node1", max_bytes=1 << 40, max_s=0.05)
        assert 0 < timed.bytes <= 256 << 20
        after = control.status().counters
        for name in ("tokenlake_received_bytes_total", "tokenlake_received_segments_total"):
            assert after[name] == before[name]
        (unknown,) = control.measure("nobody")
        assert "is not known" in unknown.problem
        with pytest.raises(Refused, match="another node"):
            control.measure("node0")
