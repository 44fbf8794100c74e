"""The service `Scheduling` of real daemons: trees, loads, plans and starts equal those of the planner in process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.operator.scene import control_of, run, told
from tests.robustness.live import LAYOUT, LIMIT_S, SEGMENT_TOKENS, Prompt, daemons, read, store, wait_told, wait_until
from tests.server.control.scene import local
from tokenlake.attention import AttentionShape
from tokenlake.config import Secret, Tenant
from tokenlake.errors import CredentialRefused, LayoutRefused, LimitReached, Refused
from tokenlake.hints import Hints
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Rates, Request, cache_load, gen_plans, grow
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.control import Control, ControlPlane, FleetRouter
from tokenlake_operator.status import status
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.scheduling import messages
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

SHAPE = AttentionShape.of(LAYOUT, q_heads=4)
MODEL = Model.of(LAYOUT, SHAPE)
INSTANCES = {"a": NodeId("node0"), "b": NodeId("node1"), "c": NodeId("node1")}


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        yield cluster


@pytest.fixture
def control(two: Cluster) -> Iterator[Control]:
    with local(two.nodes[0]) as control:
        yield control


def ask(pool: Pool, prompt: Prompt, name: str, more: int = 1) -> Request:
    keys = tuple(pool.prefix(prompt.tokens).keys)
    return Request(name=name, keys=keys, tokens=len(prompt.tokens) + more, answer_tokens=5)


def measured() -> Rates:
    rates = Rates()
    for number in range(1, 10):
        rates.prefill.add(100 * number, 0, 0.01 * number, 0.0)
        rates.decode.add(number, 100, 0.001 * number, 0.0)
        rates.peer(NodeId("node1")).fetch.add(1 << 20, 0.002, 0.0)
    rates.answer_tokens.add(7)
    return rates


def test_plans_and_loads_are_those_of_the_planner(two: Cluster, control: Control) -> None:
    shared = Prompt(1, 4)
    prompts = [Prompt(2, 2, shared), Prompt(3, 3, shared), Prompt(4, 2)]
    with two.connect(1, LAYOUT) as other, two.connect(0, LAYOUT) as pool:
        store(other, prompts[0])
        store(pool, prompts[1])
        wait_told(two)
        requests = [ask(pool, prompt, str(number)) for number, prompt in enumerate(prompts)]
        for rates in (Rates(), measured()):
            plane = ControlPlane(control, LAYOUT, INSTANCES, SHAPE, rates)
            tree = plane.get_prefix_tree(requests)
            assert tree.hit_tokens == (6 * SEGMENT_TOKENS, 7 * SEGMENT_TOKENS, 0)
            assert plane.get_cache_load([0, 1, 2], tree) == pytest.approx(
                cache_load([0, 1, 2], tree, INSTANCES, MODEL.layers, rates)
            )
            batches, dops = [[0, 2], [1]], [1, 2]
            planned = plane.gen_plans(batches, dops, tree)
            expected = gen_plans(batches, dops, tree, INSTANCES, MODEL, rates)
            assert planned.groups == expected.groups
            assert planned.transfer_plans == expected.transfer_plans
            assert [each.decisions for each in planned.query_plans] == [each.decisions for each in expected.query_plans]
            assert [each.seconds for each in planned.query_plans] == pytest.approx(
                [each.seconds for each in expected.query_plans]
            )
            assert plane.gen_plans([[0]], [1], tree, ["c"]).groups == (("c",),)


def test_a_prompt_may_come_as_tokens(two: Cluster, control: Control) -> None:
    """A router has no secret of a tenant: the daemon computes the keys."""
    prompt = Prompt(11, 3)
    with two.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        (layout,) = control.layouts()
        assert (layout.model_id, layout.segment_tokens, layout.segment_bytes) == (
            "test",
            SEGMENT_TOKENS,
            LAYOUT.segment_bytes,
        )
        ids = np.array([*prompt.tokens, 1], dtype="<u4").tobytes()
        message = pb.Prompt(name="r", token_ids=ids, fingerprint=layout.fingerprint)
        reply = control.prefix_tree(pb.GetPrefixTreeRequest(prompts=[message], segment_tokens=SEGMENT_TOKENS))
        assert list(reply.tree.hit_tokens) == [3 * SEGMENT_TOKENS]
        assert [(each.node, each.usable) for each in reply.nodes] == [("node0", True)]
        message.salt = "another"
        reply = control.prefix_tree(pb.GetPrefixTreeRequest(prompts=[message], segment_tokens=SEGMENT_TOKENS))
        assert list(reply.tree.hit_tokens) == [0]
        keys = pool.prefix(prompt.tokens, salt=("another", "mine")).keys
        pool.store_all(keys, prompt.fill, patience=LIMIT_S)
        for request_salt, hits in (("mine", 3 * SEGMENT_TOKENS), ("other", 0)):
            message.request_salt = request_salt
            reply = control.prefix_tree(pb.GetPrefixTreeRequest(prompts=[message], segment_tokens=SEGMENT_TOKENS))
            assert list(reply.tree.hit_tokens) == [hits]
        message.fingerprint = bytes(32)
        with pytest.raises(Refused, match="fingerprint"):
            control.prefix_tree(pb.GetPrefixTreeRequest(prompts=[message], segment_tokens=SEGMENT_TOKENS))


def test_a_request_starts_where_its_prefix_lies_or_is_computed(two: Cluster, control: Control) -> None:
    prompt, fresh = Prompt(21, 5), Prompt(22, 5)
    with two.connect(1, LAYOUT) as other, two.connect(0, LAYOUT) as pool:
        store(other, prompt)
        wait_told(two)
        router = FleetRouter(control, INSTANCES, MODEL, SEGMENT_TOKENS, "starts")
        # Answers are expected to be shorter than the prefix, which is then worth waiting for.
        router.report(pb.Happened(answered_tokens=4))
        start = router.where(ask(pool, prompt, "first"), send=True)
        assert start.instance in ("b", "c")
        assert (start.prefill.prefix, start.moved) == (5 * SEGMENT_TOKENS, 0)
        # Two routers of one fleet share the requests under way.
        second = FleetRouter(control, INSTANCES, MODEL, SEGMENT_TOKENS, "starts")
        sent = router.where(ask(pool, fresh, "fresh"), send=True)
        follows = second.where(ask(pool, fresh, "same prefix"))
        assert follows.instance == sent.instance
        assert follows.prefill.new == 1
        alone = FleetRouter(control, INSTANCES, MODEL, SEGMENT_TOKENS, "another")
        assert alone.where(ask(pool, fresh, "same prefix"), [sent.instance]).prefill.prefix == 0
        assert second.report() == 2
        second.first_token("fresh")
        second.finished("fresh")
        second.leave(start.instance)
        assert second.report() == 0
        second.join(start.instance, INSTANCES[start.instance])
        for number in range(1, 10):
            second.prefilled(100 * number, 0, 0.01 * number)
        # Costs are seconds once the time of a prefill is known.
        assert second.where(ask(pool, fresh, "measured")).cost < 1.0


def test_hints_arrive(two: Cluster, control: Control) -> None:
    with two.connect(0, LAYOUT) as pool:
        keys = b"".join(pool.prefix(Prompt(41, 2).tokens).keys)
        prompt = pb.Prompt(keys=keys, tokens=2 * SEGMENT_TOKENS)
        control.hint(
            pb.HintRequest(prompt=prompt, segment_tokens=SEGMENT_TOKENS, outlook=pb.OUTLOOK_OVER, category="chat")
        )
        with pytest.raises(Refused, match="ttl_s"):
            control.hint(pb.HintRequest(prompt=prompt, segment_tokens=SEGMENT_TOKENS, ttl_s=-1))


def test_messages_without_sense_are_refused(two: Cluster, control: Control) -> None:
    fleet = pb.Fleet(
        name="f",
        instances={"a": "node0"},
        layers=2,
        segment_bytes=1 << 14,
        segment_tokens=SEGMENT_TOKENS,
        query_bytes=64,
    )
    prompt = pb.Prompt(name="r", keys=bytes(64), tokens=40)
    tree = pb.PrefixTree(
        prompts=[prompt],
        segment_tokens=SEGMENT_TOKENS,
        sequences=[pb.Sequence(parent=-1, keys=bytes(32), nodes=["node0"], requests=[0])],
    )
    control.cache_load(pb.GetCacheLoadRequest(fleet=fleet, tree=tree, requests=[0]))
    wrong_tree = pb.PrefixTree(prompts=[prompt], segment_tokens=SEGMENT_TOKENS, sequences=[*tree.sequences] * 2)
    odd = pb.Prompt(name="r", keys=bytes(33), tokens=40)
    nan = pb.Rates(prefill=pb.Fit(coefficients=[float("nan")] * 4))
    wrong: list[tuple[Any, Any]] = [
        (control.prefix_tree, pb.GetPrefixTreeRequest(prompts=[odd], segment_tokens=16)),
        (control.prefix_tree, pb.GetPrefixTreeRequest(prompts=[prompt])),
        (control.prefix_tree, pb.GetPrefixTreeRequest(prompts=[prompt], segment_tokens=16, deadline_s=float("nan"))),
        (control.cache_load, pb.GetCacheLoadRequest(fleet=fleet, tree=tree, requests=[1])),
        (control.cache_load, pb.GetCacheLoadRequest(fleet=fleet, tree=wrong_tree, requests=[0])),
        (control.cache_load, pb.GetCacheLoadRequest(fleet=fleet, tree=tree, requests=[0], rates=nan)),
        (control.cache_load, pb.GetCacheLoadRequest(tree=tree)),
        (control.plans, pb.GenPlansRequest(fleet=fleet, tree=tree, batches=[pb.Batch(requests=[0], dop=2)])),
        (control.plans, pb.GenPlansRequest(fleet=fleet, tree=tree, batches=[pb.Batch(requests=[0], dop=0)])),
        (control.plans, pb.GenPlansRequest(fleet=fleet, tree=tree, idle=["z"])),
        (control.start, pb.GetStartRequest(fleet=fleet, prompt=prompt, among=["z"])),
        (control.start, pb.GetStartRequest(fleet=pb.Fleet(segment_tokens=16), prompt=prompt)),
        (control.report, pb.ReportRequest(fleet=fleet, happened=[pb.Happened()])),
        (
            control.report,
            pb.ReportRequest(fleet=fleet, happened=[pb.Happened(sent=pb.Sent(start=pb.Start(instance="z")))]),
        ),
    ]
    for call, message in wrong:
        with pytest.raises(Refused) as caught:
            call(message)
        assert not isinstance(caught.value, LimitReached | LayoutRefused)
        assert "failed on this call" not in str(caught.value), message
    many = pb.GetPrefixTreeRequest(prompts=[prompt] * 300, segment_tokens=16)
    crowd = pb.Fleet()
    crowd.CopyFrom(fleet)
    crowd.instances.update({str(number): "node0" for number in range(2000)})
    large: list[tuple[Any, Any]] = [(control.prefix_tree, many), (control.report, pb.ReportRequest(fleet=crowd))]
    for call, message in large:
        with pytest.raises(LimitReached):
            call(message)


def test_a_scheduler_s_lookups_count_as_no_reads(two: Cluster, control: Control) -> None:
    prompt = Prompt(61, 3)
    with two.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        names = ("tokenlake_match_requests_total", "tokenlake_asked_tokens_total", "tokenlake_supplied_tokens_total")
        before = {name: count for name, count in two.nodes[0].metrics().items() if name.startswith(names)}
        assert before
        ControlPlane(control, LAYOUT, INSTANCES, SHAPE).get_prefix_tree([ask(pool, prompt, "r")])
        assert {name: count for name, count in two.nodes[0].metrics().items() if name.startswith(names)} == before


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    keys = tuple(SegmentKey(bytes([number]) * 32) for number in range(8))
    request = Request(name="r", keys=keys, tokens=8 * 16 + 5)
    message = messages.tree_message(grow([request], dict.fromkeys(keys, (NodeId("a"),)), 16))
    message.sequences[0].disk_s = seconds
    with pytest.raises(ValueError, match="disk_s"):
        messages.tree_of(message, Tenant(name="red", secret=Secret(32)))


NODES = {"a": NodeId("node0"), "b": NodeId("node1"), "c": NodeId("node2")}


def test_locations_are_told_and_used() -> None:
    with daemons(3) as cluster:
        for node, location in zip(cluster.nodes, ("row-1/rack-1", "row-1/rack-2", "row-1/rack-2"), strict=True):
            node.stop()
            node.start(location=location)
        cluster.wait_ready()
        expected = {"node0": "row-1/rack-1", "node1": "row-1/rack-2", "node2": "row-1/rack-2"}
        for node in cluster.nodes:
            with local(node) as control:
                wait_until(
                    lambda control=control: (
                        {  # type: ignore[misc]
                            each.node: each.location for each in control.cluster().members
                        }
                        == expected
                    ),
                    f"{node.name} knows the locations",
                )
        prompt = Prompt(1, 5)
        with cluster.connect(1, LAYOUT) as owner, cluster.connect(2, LAYOUT) as near:
            store(owner, prompt)
            wait_told(cluster)
            with local(cluster.nodes[0]) as control:
                router = FleetRouter(control, NODES, MODEL, SEGMENT_TOKENS)
                keys = tuple(owner.prefix(prompt.tokens).keys)
                asked = Request(name="read", keys=keys, tokens=len(prompt.tokens) + 1)
                wait_until(lambda: router.where(asked).prefill.prefix == len(prompt.tokens), "the prefix is found")
                assert router.where(asked).instance == "b"
                for number in range(9):
                    start = router.where(Request(name=str(number), keys=asked.keys, tokens=asked.tokens), ["a", "c"])
                    assert (start.instance, start.moved) == ("c", len(prompt.tokens))
            assert read(near, prompt) == prompt.segments
        first = control_of(cluster.nodes[0])

        def seen() -> list[str]:
            return [each["check"] for each in told(status, "--socket", first)["findings"]]

        answer = told(status, "--socket", first)
        assert {each["node"]: each.get("location") for each in answer["cluster"]["members"]} == expected
        assert "locations" not in seen()
        assert "row-1/rack-2" in run(status, "--socket", first).stdout
        cluster.nodes[1].stop()
        cluster.nodes[1].start(location="rack-2")
        wait_until(lambda: "locations" in seen(), "the location that node1 has after its restart")


def test_prefetches_and_pins(two: Cluster) -> None:
    """A prompt that one node has comes to the other before its request, by its tokens and by its keys."""
    prompt = Prompt(77, 3)
    with two.connect(0, LAYOUT) as writer, two.connect(1, LAYOUT) as reader, local(two.nodes[1]) as control:
        store(writer, prompt)
        wait_told(two)
        mark = bytes(LAYOUT.fingerprint())
        by_tokens = pb.Prompt(token_ids=np.asarray(prompt.tokens, "<u4").tobytes(), fingerprint=mark)
        answer = control.prefetch(pb.PrefetchRequest(prompt=by_tokens))
        assert (answer.here, answer.missing, answer.lost, answer.refused, answer.prefix) == (3, 0, 0, 0, 3)
        keys = reader.prefix(prompt.tokens).keys
        nowhere = reader.prefix(Prompt(78, 1).tokens).keys
        both = pb.Prompt(keys=b"".join([*nowhere, *keys]), tokens=4 * SEGMENT_TOKENS, fingerprint=mark)
        answer = control.prefetch(pb.PrefetchRequest(prompt=both, source="node0", pin_s=60.0))
        assert (answer.here, answer.missing, answer.prefix) == (3, 1, 0)
        with reader.match(keys) as lease:
            assert bytes(lease.codes) == bytes([Code.LOCAL] * 3)
        assert control.unpin(pb.UnpinRequest(prompt=both, segment_tokens=SEGMENT_TOKENS)) == 3
        assert control.unpin(pb.UnpinRequest()) == 0
        assert reader.prefetch(keys, pin_s=60.0) == bytes([Code.LOCAL] * 3)
        assert reader.prefetch(nowhere) == bytes([Code.MISSING])
        reader.unpin(keys[:1])
        # The answer of a later call on the same connection tells that the message has arrived.
        reader.prefetch(nowhere)
        assert control.unpin(pb.UnpinRequest()) == 2
        reader.hint(keys, Hints(pin_s=60.0))
        reader.prefetch(nowhere)
        assert control.unpin(pb.UnpinRequest()) == 3
        for wrong, said in (
            (pb.PrefetchRequest(prompt=pb.Prompt(keys=keys[0])), "no engine of this tenant"),
            (pb.PrefetchRequest(prompt=by_tokens, pin_s=-1), "pin_s is -1"),
            (pb.PrefetchRequest(prompt=by_tokens, source="n" * 999), "the name of a node"),
            (pb.PrefetchRequest(prompt=by_tokens, tenant="nobody"), "nobody"),
        ):
            with pytest.raises((Refused, CredentialRefused), match=said):
                control.prefetch(wrong)
