"""One name goes with a request through the logs of engine, daemon and peers."""

from __future__ import annotations

import logging

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, Prompt, daemons, wait_told, wait_until
from tokenlake_client import MatchOptions
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


def logged(nodes: list[Node], text: str) -> bool:
    """True when the log of one of the nodes has the text."""
    return any(text in node.log.read_text() for node in nodes)


def test_all_logs_name_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with daemons(3, log_level="debug") as cluster:
        check(cluster, caplog)


def check(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    writer, reader, third = cluster.nodes
    prompt = Prompt(1, 20)
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other, caplog.at_level(logging.DEBUG):
        with pool.store(pool.prefix(prompt.tokens).keys, request="the store") as write:
            write.fill(prompt.fill)
        assert logged([writer], "'the store': a Prepare")
        wait_told(cluster)
        with other.match(other.prefix(prompt.tokens).keys, MatchOptions(request="the match")) as lease:
            assert lease.request == "the match"
            assert lease.local_hits < lease.hits == prompt.segments
            assert len(lease.fetch(deadline_s=LIMIT_S)) == prompt.segments
        assert logged([reader], "'the match': a Match")
        assert logged([reader], "'the match': a Fetch")
        for nodes, text in (([writer, third], "'the match': a Lookup"), ([writer], "'the match': node1 pulls")):
            wait_until(lambda nodes=nodes, text=text: logged(nodes, text), text)  # type: ignore[misc]
        assert "'the match': match of 20 segments" in caplog.text
        with other.match([]) as unnamed:
            assert unnamed.request
            assert logged([reader], repr(unnamed.request))
