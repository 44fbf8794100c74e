"""The service `Admin` of a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.robustness.live import (
    LAYOUT,
    PATIENT,
    SEGMENT_TOKENS,
    Prompt,
    daemons,
    read,
    store,
    total,
    wait_told,
)
from tests.server.control.scene import local
from tokenlake.errors import CredentialRefused, LayoutRefused, LimitReached, MembershipRefused, Refused
from tokenlake.wire.funnel import MissReason
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

pytest.importorskip("grpc")
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


def test_explain(two: Cluster) -> None:
    prompt = Prompt(20, 2)
    with two.connect(0, LAYOUT) as pool, local(two.nodes[0]) as control:
        keys = pool.prefix(prompt.tokens).keys
        pool.match(keys, MatchOptions(request="a request"), deadline_s=2.0).release()
        funnel = control.explain("a req").funnel
        assert (funnel.request, funnel.ideal) == ("a request", 2 * SEGMENT_TOKENS)
        assert [(each.reason, each.tokens) for each in funnel.missed] == [(MissReason.NEVER_STORED, 2 * SEGMENT_TOKENS)]
        assert "a request" in control.explain("").names
        with pytest.raises(CredentialRefused, match="no tenant 'blue'"):
            control.explain("a req", "blue")


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


def test_weights_that_changed_end_the_sessions_with_their_digest() -> None:
    prompt = Prompt(41, 2)
    with daemons(1) as cluster, local(cluster.nodes[0]) as control:
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
            reply = control.weights_changed(LAYOUT.weights_digest)
            assert (reply.sessions, reply.evicted) == (1, 2)
            assert control.weights_changed("another").sessions == 0
        with pytest.raises(LayoutRefused, match="changed in place"):
            Pool.connect(cluster.nodes[0].socket, LAYOUT, deadlines=PATIENT)
        assert control.status().pools[0].segments["primary"] == 0


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
    assert "asked for the drain of node 'node0': refused:" in logged
    assert "asked for the removal of node 'node1': refused:" in logged
    assert ": accepted" not in logged


def test_the_engines_by_layout(two: Cluster) -> None:
    other = msgspec.structs.replace(LAYOUT, dtype="float16")
    with local(two.nodes[0]) as control, two.connect(0, LAYOUT), two.connect(0, LAYOUT), two.connect(0, other):
        found = {bytes(each.layout.fingerprint): (each.tenant, each.processes) for each in control.engines()}
        assert found == {LAYOUT.fingerprint(): ("default", 2), other.fingerprint(): ("default", 1)}


def test_hot_prefixes_and_slow_calls(two: Cluster) -> None:
    hot, cold = Prompt(60, 3), Prompt(61, 2)
    with two.connect(0, LAYOUT) as pool, local(two.nodes[0]) as control:
        store(pool, hot)
        for number in range(7):
            prompt = hot if number else cold
            with pool.match(pool.prefix(prompt.tokens).keys, MatchOptions(request=f"top-{number}")) as lease:
                lease.fetch()
                lease.takes(0 if number else 3, 1 << 20)
        pool.match([]).release()
        activity = control.activity(1000)
        prefixes = {bytes(each.key): each for each in activity.prefixes}
        first = prefixes[bytes(pool.prefix(hot.tokens).keys[0])]
        assert (first.tenant, first.requests, first.newest) == ("default", 6, "top-6")
        assert first.asked_tokens == first.supplied_tokens == 6 * 3 * SEGMENT_TOKENS
        other = prefixes[bytes(pool.prefix(cold.tokens).keys[0])]
        assert (other.requests, other.asked_tokens, other.supplied_tokens) == (1, 2 * SEGMENT_TOKENS, 0)
        assert other.engine_had_tokens == 3
        assert [each.requests for each in activity.prefixes] == sorted(
            (each.requests for each in activity.prefixes), reverse=True
        )
        assert [each.seconds for each in activity.calls] == sorted(
            (each.seconds for each in activity.calls), reverse=True
        )
        assert len(control.activity(1).prefixes) == 1


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


def test_an_unreachable_peer_is_the_result_of_its_measurement() -> None:
    with daemons(2) as cluster, local(cluster.nodes[0]) as control:
        cluster.nodes[1].kill()
        (path,) = control.measure("node1")
        assert path.problem
        assert path.bytes == 0


def test_secrets_have_digests_that_differ_where_they_do(tmp_path: Path) -> None:
    digests = []
    for secret in ("aa", "bb"):
        file = tmp_path / "node.toml"
        file.write_text(f"cluster_secret = '{'cc' * 32}'\n[[tenants]]\nname = 'red'\nsecret = '{secret * 32}'\n")
        file.chmod(0o600)
        with daemons(1, config=str(file)) as cluster, local(cluster.nodes[0]) as control:
            settings = {each.name: each for each in control.config()}
            digests.append((settings["tenants"].digests["red"], settings["cluster_secret"].digests["0"]))
            assert secret * 8 not in str(settings)
            assert dict(settings["memory"].digests) == {}
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1]
