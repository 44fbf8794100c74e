"""The JSON of the page: what it has of large clusters, and its limits."""

from __future__ import annotations

import msgspec
import pytest

from tests.page.facts import HOSTILE, compressed, document
from tokenlake_server.page import build
from tokenlake_server.page.document import PageDocument


def test_a_large_cluster_has_a_small_page() -> None:
    made = document(100, 1000, HOSTILE + "x" * 1000)
    assert len(made.nodes) == 100
    assert (len(made.tenants), made.tenants_left_out) == (build.MAX_TENANTS, 900)
    text = msgspec.json.encode(made)
    assert len(text) < 400_000
    assert len(compressed(made)) < 40_000
    assert msgspec.json.decode(text, type=PageDocument) == made


def test_every_list_has_a_limit() -> None:
    made = document(5000, 5000, "x" * 1000)
    assert (len(made.nodes), made.nodes_left_out) == (build.MAX_NODES, 5000 - build.MAX_NODES)
    assert len(made.links) <= 65
    assert len(made.problems) == build.MAX_PROBLEMS
    assert len(msgspec.json.encode(made)) < 600_000


def test_this_node_and_lost_ones_come_first() -> None:
    made = document(30, 2)
    assert [each.name for each in made.nodes[:5]] == ["n0", "n3", "n10", "n20", "n1"]
    lost = made.nodes[2]
    assert (lost.state, lost.used_share, lost.reason) == ("unreachable", None, "no answer")
    assert made.nodes[1].state == "draining"


def test_rates_and_fullness_of_tenants() -> None:
    made = document(3, 20)
    assert made.tenants[0].used_bytes == made.tenants[0].quota_bytes == 1 << 20
    assert made.tenants[0].read_bytes_per_s == pytest.approx(200.0)
    assert made.links[0].sent_bytes_per_s == pytest.approx(200.0)
    assert [each.used_bytes for each in made.tenants] == sorted(
        (each.used_bytes for each in made.tenants), reverse=True
    )


def test_one_tenant_sees_its_own_memory_only() -> None:
    assert [each.name for each in document(3, 20, tenant="t7").tenants] == ["t7"]
