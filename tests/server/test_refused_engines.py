"""Engines that go without the pool appear in the state of the daemon, in its metrics and its log, and leave with their
process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.operator.scene import control_of, told
from tests.robustness.live import LAYOUT, Prompt, daemons, outcomes, store, total, wait_until
from tests.server.control.scene import local
from tests.server.raw import Raw, hello, refusal
from tests.server.scene import OF_THIS_USER, tenants
from tokenlake.keys import probe
from tokenlake.metrics import Counters
from tokenlake.wire import PROTOCOL_VERSION, Code, engine
from tokenlake_client import Pool
from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.doctor.running import check_refused
from tokenlake_operator.status import status
from tokenlake_operator.top import top
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.engines.connected_process import ConnectedProcess
from tokenlake_server.engines.refused import FORGOTTEN_S, MAX_KEPT, REFUSED_ENGINES, Reason, RefusedEngines
from tokenlake_testing.cluster import Cluster, Node


def without_pool(node: Node) -> list[pb.RefusedEngine]:
    with local(node) as control:
        return list(control.status().refused)


def wait_shown(node: Node, expected: list[tuple[str, int]]) -> None:
    """Wait until the state, which is cached for a moment, has these reasons and numbers of attempts."""
    wait_until(lambda: [(each.reason, each.attempts) for each in without_pool(node)] == expected, str(expected))


def status_of(node: Node) -> Any:
    """What `tokenlake status` prints as JSON; its exit status is 1 where an error is among the findings."""
    return told(status, "--socket", control_of(node))


def refusals(node: Node, reason: str) -> float:
    return node.metrics()[f'tokenlake_refused_engines_total{{reason="{reason}"}}']


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A daemon with two tenants: the uid of this process is that of 'blue'."""
    file = tenants(tmp_path_factory.mktemp("refused"), blue=OF_THIS_USER)
    with daemons(config=file) as cluster:
        yield cluster


@pytest.fixture
def node(one: Cluster) -> Node:
    """The daemon, which refused no engine."""
    one.connect(0, LAYOUT).close()
    wait_shown(one.nodes[0], [])
    return one.nodes[0]


def of_layout(**changes: object) -> engine.Hello:
    """The Hello of an engine with a changed layout."""
    layout = msgspec.structs.replace(LAYOUT, **changes)
    return hello(layout=layout.encode(), probe=probe(engine.PROBE_SECRET, layout.fingerprint()))


CAUSES: dict[Reason, Callable[[], engine.Hello]] = {
    Reason.TOKEN: lambda: hello(token="a wrong token"),
    Reason.VERSION: lambda: hello(oldest_version=PROTOCOL_VERSION + 1, newest_version=PROTOCOL_VERSION + 3),
    Reason.PROBE: lambda: hello(probe=bytes(32)),
    Reason.LAYOUT: lambda: hello(layout=b"\xc1 nonsense"),
    Reason.MEMORY: lambda: of_layout(layers=1000),
    Reason.WEIGHTS: lambda: of_layout(weights_digest="retired"),
}


@pytest.mark.live
@pytest.mark.parametrize("reason", CAUSES)
def test_a_refused_engine_is_shown_until_it_is_accepted(one: Cluster, node: Node, reason: Reason) -> None:
    if reason is Reason.WEIGHTS:
        with local(node) as control:
            control.weights_changed("retired", "blue")
    before = refusals(node, reason)
    failed = refusal(node.socket, CAUSES[reason]())
    assert refusals(node, reason) == before + 1
    wait_shown(node, [(reason, 1)])
    (found,) = without_pool(node)
    assert (found.pid, found.uid, found.reason, found.problem) == (os.getpid(), os.getuid(), reason, failed.reason)
    assert found.tenant == ("" if reason in (Reason.TOKEN, Reason.VERSION) else "blue")
    assert found.cure == reason.cure
    (finding,) = status_of(node)["findings"]
    assert (finding["check"], finding["cure"]) == (f"engine-{reason}", reason.cure)

    def lines() -> int:
        text = node.log.read_text().splitlines()
        return len([line for line in text if f"{failed.reason}; cure: {reason.cure}" in line])

    assert lines() == 1
    refusal(node.socket, CAUSES[reason]())
    wait_shown(node, [(reason, 2)])
    assert lines() == 1
    one.connect(0, LAYOUT).close()
    wait_shown(node, [])
    assert status_of(node)["findings"] == []
    assert "a wrong token" not in node.log.read_text()


@pytest.mark.live
def test_limits_refuse_engines_too(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    file.write_text("max_sessions = 1\n")
    with daemons(config=str(file)) as cluster, cluster.connect(0, LAYOUT):
        node = cluster.nodes[0]
        refusal(node.socket, hello())
        wait_shown(node, [("limit", 1)])
        assert "'max_sessions' of 1" in without_pool(node)[0].problem
        # The engine opens another session by itself.
        refusal(node.socket, hello(session=12345))
        assert refusals(node, "session") == 1
        refusal(node.socket, hello())
        wait_shown(node, [("limit", 2)])


@pytest.mark.live
def test_an_engine_that_declines_says_why(one: Cluster, node: Node) -> None:
    before = refusals(node, "declined")
    with Raw(node.socket) as raw:
        raw.send(engine.Bye("the model has \n no name"))
        assert raw.closed()
    wait_shown(node, [("declined", 1)])
    (found,) = without_pool(node)
    assert (found.reason, found.problem) == ("declined", "the model has \\n no name")
    (finding,) = status_of(node)["findings"]
    assert (finding["check"], finding["severity"]) == ("engine-declined", "warning")
    assert refusals(node, "declined") == before + 1
    with Raw(node.socket) as raw:
        raw.send(engine.Bye())
        assert raw.closed()
    assert refusals(node, "declined") == before + 1
    one.connect(0, LAYOUT).close()
    wait_shown(node, [])


@pytest.mark.live
def test_an_engine_leaves_the_list_with_its_process(node: Node) -> None:
    program = (
        "import sys\n"
        "from tests.robustness.live import LAYOUT\n"
        "from tokenlake.errors import CredentialRefused\n"
        "from tokenlake_client import Pool\n"
        "try:\n"
        "    Pool.connect(sys.argv[1], LAYOUT, 'wrong')\n"
        "except CredentialRefused:\n"
        "    print('refused', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(node.socket)], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"refused\n"
        wait_shown(node, [("token", 1)])
        assert without_pool(node)[0].pid == process.pid
        process.stdin.close()
    wait_shown(node, [])


@pytest.mark.live
def test_segments_that_get_no_memory_are_named() -> None:
    """An engine that is connected, and whose segments get no region, stores nothing."""
    with daemons(memory="1MiB") as cluster, cluster.connect(0, LAYOUT) as first:
        node = cluster.nodes[0]
        prompt = Prompt(1, 4)
        store(first, prompt)
        # A segment takes nearly all of memory, of which the first engine reads a part.
        other = msgspec.structs.replace(LAYOUT, layers=120)
        with first.match(first.prefix(prompt.tokens).keys), cluster.connect(0, other) as second:
            codes = bytes(second.store(second.prefix(Prompt(2, 1).tokens).keys).codes)
            assert outcomes(codes) == {Code.NO_REGION}
            assert without_pool(node) == [], "memory follows use within seconds"
            wait_shown(node, [("memory", 1)])
            (found,) = without_pool(node)
            assert found.pid == os.getpid()
            assert "segments of 960KiB get no memory" in found.problem
            assert refusals(node, "memory") == 1
        wait_shown(node, [])


@pytest.mark.live
def test_an_engine_and_its_processes_are_shown_apart(one: Cluster, node: Node) -> None:
    wait_until(lambda: total(node, "tokenlake_processes") == 0, "earlier ones left")
    with one.connect(0, LAYOUT) as scheduler, Pool.connect(node.socket, LAYOUT, session=scheduler.engine.session):
        # A connection that has not joined a session is no process of an engine.
        with Raw(node.socket):
            wait_until(lambda: counts(status_of(node)["nodes"]["node0"]) == (1, 2), "one engine of two processes")
        (row,) = told(top, "--once", "--interval", "0.2", "--socket", control_of(node))["nodes"]
        assert counts(row) == (total(node, "tokenlake_engines"), total(node, "tokenlake_processes")) == (1, 2)


def counts(row: Any) -> tuple[int, int]:
    return row["engines"], row["processes"]


# -- the list itself


def watched() -> tuple[RefusedEngines, Counters, ConnectedProcess]:
    """A list, its counters, and a process (this one) for it."""
    one, other = socket.socketpair()
    with one, other:
        process = ConnectedProcess(one)
    counters = Counters()
    return RefusedEngines(asyncio.get_running_loop(), counters), counters, process


def pidfds() -> int:
    """The number of pidfds of this process."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "pidfd" in os.readlink(each)
    return count


async def test_the_list_is_bounded_and_closes_its_descriptors() -> None:
    refused, counters, process = watched()
    before = pidfds()
    for pid in range(MAX_KEPT + 10):
        process.pid = pid
        refused.refused(process, "", Reason.TOKEN, "no")
    assert [each.pid for each in refused.all()] == list(range(10, MAX_KEPT + 10))
    assert counters[REFUSED_ENGINES] == MAX_KEPT + 10
    assert pidfds() == before + MAX_KEPT
    refused.close()
    assert pidfds() == before
    process.close()


async def test_without_a_pidfd_a_process_is_kept_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, _, process = watched()
    process.close()
    refused.refused(process, "", Reason.UID, "no")
    assert len(refused.all()) == 1
    later = asyncio.get_running_loop().time() + FORGOTTEN_S + 1
    monkeypatch.setattr(refused, "_loop", type("Later", (), {"time": staticmethod(lambda: later)}))
    assert refused.all() == []


def shown(reason: str, pid: int, problem: str = "it may not", cure: str = "let it") -> pb.RefusedEngine:
    return pb.RefusedEngine(reason=reason, pid=pid, uid=1000, problem=problem, cure=cure, for_s=300, last_s=12)


def test_each_reason_is_one_finding() -> None:
    found = list(check_refused("a", [shown("token", 7), shown("declined", 8), shown("token", 9)]))
    problem, cure = "without the pool for 5 min: it may not", "let it"
    assert found == [
        Finding("error", "engine-token", "a, 2 processes, the last one process 9 of uid 1000", problem, cure),
        Finding("warning", "engine-declined", "a, process 8 of uid 1000", problem, cure),
    ]
    assert list(check_refused("a", [])) == []


def test_each_reason_has_a_cure_and_is_in_the_runbook() -> None:
    runbook = (Path(__file__).parents[2] / "docs" / "operations" / "runbook.md").read_text()
    (section,) = re.findall(r"^## Engines are refused\n(.*?)^## ", runbook, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(Reason)
    assert all(reason.cure for reason in Reason)
