"""Engines that go without the pool, as an operator sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

from tests.operator.scene import checks, control_of, examined, run, told
from tests.robustness.live import LAYOUT, PATIENT, daemons, wait_until
from tests.server.raw import hello, refusal
from tokenlake.wire import engine
from tokenlake_client import Pool
from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.doctor.running import check_refused
from tokenlake_operator.status import status
from tokenlake_operator.top import top
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.engines.refused import Reason
from tokenlake_testing.cluster import Cluster


def refused(reason: str, pid: int, problem: str = "it may not", cure: str = "let it") -> pb.RefusedEngine:
    return pb.RefusedEngine(reason=reason, pid=pid, uid=1000, problem=problem, cure=cure, for_s=300, last_s=12)


def test_each_reason_is_one_finding() -> None:
    found = list(check_refused("a", [refused("token", 7), refused("declined", 8), refused("token", 9)]))
    assert found == [
        Finding(
            "error",
            "engine-token",
            "a, 2 processes, the last one process 9 of uid 1000",
            "without the pool for 5 min: it may not",
            "let it",
        ),
        Finding(
            "warning", "engine-declined", "a, process 8 of uid 1000", "without the pool for 5 min: it may not", "let it"
        ),
    ]
    assert list(check_refused("a", [])) == []


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.mark.live
def test_a_refused_engine_is_an_error_with_its_cure(one: Cluster) -> None:
    node = one.nodes[0]
    refusal(node.socket, hello(layout=b"nonsense"))
    answer = told(status, "--socket", control_of(node))
    assert checks(answer) == ["engine-layout"]
    assert [each["reason"] for each in answer["nodes"]["node0"]["refused"]] == ["layout"]
    shown = run(status, "--socket", control_of(node))
    assert shown.exit_code == 1
    assert "error" in shown.stdout
    report = examined(node)
    assert "engine-layout" in checks(report)
    (finding,) = [each for each in report["findings"] if each["check"] == "engine-layout"]
    assert finding["cure"] == Reason.LAYOUT.cure
    one.connect(0, LAYOUT).close()
    wait_until(lambda: told(status, "--socket", control_of(node))["findings"] == [], "it was accepted")
    assert run(status, "--socket", control_of(node)).exit_code == 0


@pytest.mark.live
def test_a_warning_is_no_failure(one: Cluster) -> None:
    node = one.nodes[0]
    with Pool.connect(node.socket, LAYOUT, deadlines=PATIENT) as pool:
        pool.link.channel.tell(engine.Bye("it cannot name its weights"))
        wait_until(
            lambda: checks(told(status, "--socket", control_of(node))) == ["engine-declined"], "the daemon has read it"
        )
        assert "it cannot name its weights" in run(status, "--socket", control_of(node)).stdout
    one.connect(0, LAYOUT).close()


@pytest.mark.live
def test_an_engine_and_its_processes_are_shown_apart(one: Cluster) -> None:
    node = one.nodes[0]
    with (
        one.connect(0, LAYOUT) as scheduler,
        Pool.connect(node.socket, LAYOUT, session=scheduler.engine.session, deadlines=PATIENT),
    ):

        def shown() -> tuple[int, int]:
            own = told(status, "--socket", control_of(node))["nodes"]["node0"]
            return own["engines"], own["processes"]

        wait_until(lambda: shown() == (1, 2), "one engine of two processes")
        screen = told(top, "--once", "--interval", "0.2", "--socket", control_of(node))
        assert [(each["engines"], each["processes"]) for each in screen["nodes"]] == [(1, 2)]
        head, row = (run(status, "--socket", control_of(node)).stdout.splitlines()[at].split("  ") for at in (1, 2))
        assert [word.strip() for word in head if word.strip()][-4:] == ["engines", "processes", "up", "version"]
        assert [word.strip() for word in row if word.strip()][-4:-2] == ["1", "2"]
