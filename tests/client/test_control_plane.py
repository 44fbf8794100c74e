"""The control plane with real daemons, and the example scheduler of the documentation."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.robustness.live import LAYOUT, PATIENT_S, SEGMENT_TOKENS, Prompt, daemons, read, store, wait_told
from tests.server.control.scene import local
from tokenlake.attention import AttentionShape
from tokenlake.errors import ConfigurationError
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import PrefixTree, Request, Way
from tokenlake_client import Pool
from tokenlake_client.control import Certificates, Control, ControlPlane
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SHAPE = AttentionShape.of(LAYOUT, q_heads=4)
ANSWER = 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "examples" / "scheduler.py"
    spec = importlib.util.spec_from_file_location("scheduler_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ask(pool: Pool, prompt: Prompt, name: str) -> Request:
    return Request(
        name=name,
        keys=tuple(pool.prefix(prompt.tokens).keys),
        tokens=len(prompt.tokens),
        answer_tokens=ANSWER,
    )


def places_of(tree: PrefixTree, sequence: int) -> list[NodeId]:
    """The node of each segment of a sequence."""
    found = tree.sequences[sequence]
    return [found.owners[0]] * len(found.keys)


def test_a_tree_names_the_nodes_of_stored_segments(three: Cluster) -> None:
    shared = Prompt(1, 4)
    mine, other, unknown = Prompt(2, 2, shared), Prompt(3, 3, shared), Prompt(4, 2)
    instances = {node.name: NodeId(node.name) for node in three.nodes}
    with three.connect(0, LAYOUT) as pool, local(three.nodes[0]) as control:
        plane = ControlPlane(control, LAYOUT, instances, SHAPE)
        store(pool, mine)
        store(pool, other)
        wait_told(three)
        requests = [ask(pool, prompt, str(index)) for index, prompt in enumerate((mine, other, unknown))]
        tree = plane.get_prefix_tree(requests)
        # The last token of a prompt is always computed, so that the segment it completes is no hit.
        assert tree.hit_tokens == (5 * SEGMENT_TOKENS, 6 * SEGMENT_TOKENS, 0)
        assert sum(tree.slots().values()) == 4 + 1 + 2
        assert {sequence.requests for sequence in tree.sequences if sequence.parent < 0} == {(0, 1)}
        for index, request in enumerate(requests):
            with pool.match(request.keys[: len(request.keys) - 1], deadline_s=PATIENT_S) as lease:
                places = [
                    node
                    for sequence in tree.sequences
                    if index in sequence.requests
                    for node in sequence.owners
                    for _ in sequence.keys
                ]
                assert lease.nodes() == places
                pending, until = lease.begin_nodes(), time.monotonic() + 10
                while (nodes := pending.poll()) is None:
                    assert time.monotonic() < until
                assert nodes == places
        assert three.nodes[0].metrics()['tokenlake_map_entries{map="leases to peers"}'] == 0
        for index, request in enumerate(requests):
            start = plane.router.where(request)
            assert start.prefill.prefix == tree.hit_tokens[index]
            at = [node for sequence in tree.paths[index] for node in places_of(tree, sequence)]
            # No instance is busy: the instance with most of the prefix is chosen.
            assert start.moved == (len(at) - max(map(at.count, instances.values()))) * SEGMENT_TOKENS
        plans = plane.gen_plans([[0, 1], [2]], [1, 1], tree)
        assert all(decision.way in (Way.LOCAL, Way.FETCH) for decision in plans.query_plans[0].decisions)
        assert plane.get_prefix_tree().hit_tokens == tree.hit_tokens


def test_a_scheduler_without_a_daemon_gets_a_plan() -> None:
    instances = {"a": NodeId("node0")}
    with (
        daemons(1) as cluster,
        cluster.connect(0, LAYOUT) as pool,
        local(cluster.nodes[0]) as control,
    ):
        plane = ControlPlane(control, LAYOUT, instances, SHAPE)
        request = ask(pool, Prompt(1, 3), "r")
        cluster.nodes[0].kill()
        tree = plane.get_prefix_tree([request])
        assert tree.hit_tokens == (0,)
        assert plane.gen_plans([[0]], [1], tree).groups == (("a",),)


def test_a_refused_request_is_a_miss(three: Cluster) -> None:
    """A prompt of more segments than a daemon looks up at once is a miss, and the other requests are found."""
    known = Prompt(300, 3)
    with three.connect(0, LAYOUT) as pool, local(three.nodes[0]) as control:
        plane = ControlPlane(control, LAYOUT, {"a": NodeId("node0")}, SHAPE)
        store(pool, known)
        count = (1 << 16) + 2
        keys = tuple(SegmentKey(number.to_bytes(32, "little")) for number in range(count))
        endless = Request(name="endless", keys=keys, tokens=count * SEGMENT_TOKENS, answer_tokens=ANSWER)
        tree = plane.get_prefix_tree([ask(pool, known, "known"), endless, ask(pool, known, "again")])
        assert tree.hit_tokens == (2 * SEGMENT_TOKENS, 0, 2 * SEGMENT_TOKENS)


def test_the_example_scheduler(three: Cluster, example: ModuleType) -> None:
    """Two instances run on node0 and one on each other node. The engine of an instance reads the cached segments,
    compares them and stores the others."""
    instances = {"a": NodeId("node0"), "b": NodeId("node0"), "c": NodeId("node1"), "d": NodeId("node2")}
    documents = [Prompt(100 + number, 6) for number in range(3)]
    prompts = [Prompt(200 + number, 2, documents[number % 3]) for number in range(18)]
    pools = [three.connect(number, LAYOUT) for number in range(3)]
    try:
        with local(three.nodes[0]) as control:
            scheduler = example.Scheduler(ControlPlane(control, LAYOUT, instances, SHAPE))
            for number, prompt in enumerate(prompts):
                scheduler.add(ask(pools[0], prompt, str(number)))
            served: list[str] = []
            hits = 0
            while scheduler.waiting or scheduler.running:
                works = scheduler.step()
                taken = [name for work in works for name in work.instances]
                assert len(set(taken)) == len(taken)
                for work in works:
                    pool = pools[int(instances[work.instances[0]].removeprefix("node"))]
                    assert work.query_plan.node == instances[work.instances[0]]
                    for request in work.requests:
                        served.append(request.name)
                        hits += read(pool, prompts[int(request.name)])
                        store(pool, prompts[int(request.name)])
                wait_told(three)
            assert sorted(served, key=int) == [str(number) for number in range(len(prompts))]
            assert hits > 0
    finally:
        for pool in pools:
            pool.close()


def test_a_certificate_that_cannot_be_read_is_a_wrong_setting(tmp_path: Path) -> None:
    """A caller tries again after `Unreachable`, which would not help."""
    present = tmp_path / "present.pem"
    present.touch()
    files = Certificates(present, tmp_path / "absent.pem", present)
    with pytest.raises(ConfigurationError, match=r"setting 'key' is '.*absent.pem'; expected a file .*No such file"):
        Control.connect("127.0.0.1:1", "a", files)
