"""Three daemons with locations: each knows those of the others, a request goes near its prefix, and the operator sees
them."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

from tests.operator.scene import control_of, run, told
from tests.robustness.live import LAYOUT, SEGMENT_TOKENS, Prompt, daemons, read, store, wait_told, wait_until
from tests.server.control.scene import local
from tokenlake.attention import AttentionShape
from tokenlake.identity import NodeId
from tokenlake.planner import Model, Request
from tokenlake_client.control import FleetRouter
from tokenlake_operator.status import status

pytestmark = pytest.mark.live

INSTANCES = {"a": NodeId("node0"), "b": NodeId("node1"), "c": NodeId("node2")}
MODEL = Model.of(LAYOUT, AttentionShape.of(LAYOUT, q_heads=4))


def test_locations_are_told_and_used() -> None:
    with daemons(3) as cluster:
        for node, location in zip(cluster.nodes, ("row-1/rack-1", "row-1/rack-2", "row-1/rack-2"), strict=True):
            node.stop()
            node.start(location=location)
        cluster.wait_ready()
        expected = {"node0": "row-1/rack-1", "node1": "row-1/rack-2", "node2": "row-1/rack-2"}
        for node in cluster.nodes:
            with local(node) as control:
                assert {each.node: each.location for each in control.cluster().members} == expected
        prompt = Prompt(1, 5)
        with cluster.connect(1, LAYOUT) as owner, cluster.connect(2, LAYOUT) as near:
            store(owner, prompt)
            wait_told(cluster)
            with local(cluster.nodes[0]) as control:
                router = FleetRouter(control, INSTANCES, MODEL, SEGMENT_TOKENS)
                keys = tuple(owner.prefix(prompt.tokens).keys)
                asked = Request(name="read", keys=keys, tokens=len(prompt.tokens) + 1)
                assert router.where(asked).instance == "b"
                for number in range(9):
                    start = router.where(Request(name=str(number), keys=asked.keys, tokens=asked.tokens), ["a", "c"])
                    assert (start.instance, start.moved) == ("c", len(prompt.tokens))
            assert read(near, prompt) == prompt.segments
        first = control_of(cluster.nodes[0])
        answer = told(status, "--socket", first)
        assert {each["node"]: each.get("location") for each in answer["cluster"]["members"]} == expected
        assert answer["findings"] == []
        assert "row-1/rack-2" in run(status, "--socket", first).stdout

        cluster.nodes[1].stop()
        cluster.nodes[1].start(location="rack-2")

        def seen() -> list[str]:
            return [each["check"] for each in told(status, "--socket", first)["findings"]]

        wait_until(lambda: seen() == ["locations"], "the location that node1 has after its restart")
