"""`bench planner`: shaped links, inputs measured from timings, regret, and one small run on real daemons."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.planner import Model, Rates
from tokenlake_testing.ports import reserve_port

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
command = pytest.importorskip("tokenlake_bench.planner.command")
judging = pytest.importorskip("tokenlake_bench.planner.judging")
measuring = pytest.importorskip("tokenlake_bench.planner.measuring")
passes = pytest.importorskip("tokenlake_bench.planner.passes")
rig = pytest.importorskip("tokenlake_bench.planner.rig")
shaping = pytest.importorskip("tokenlake_bench.planner.shaping")

MODEL = Model(layers=3, segment_bytes=768 << 10, query_bytes=3096)
PrefixUse, Work = rig.PrefixUse, rig.Work


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The rig computes with one thread; later tests want theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- links


def test_a_line_keeps_its_bandwidth_and_delay() -> None:
    line = shaping.Line()
    line.shape = shaping.Shape(1e6, 0.5)
    assert line.enter(1000, 10.0) == pytest.approx(10.501)
    assert line.enter(1000, 10.0) == pytest.approx(10.502)
    assert line.enter(1000, 20.0) == pytest.approx(20.501)


def test_what_waits_in_a_full_line_is_short() -> None:
    line = shaping.Line()
    line.shape = shaping.Shape(1e6, 0.0)
    line.enter(4000, 0.0)
    assert not line.full(0.0)
    line.enter(4000, 0.0)
    assert line.full(0.0)
    assert not line.full(0.1)


def test_bytes_and_ends_go_through_in_both_directions() -> None:
    sent = bytes(range(256)) * 2000
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                got.append(stream.read())
                connection.sendall(got[0][::-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = reserve_port()
        links = shaping.Shaping([shaping.Route("a", "b", port, listener.getsockname()[1])])
        try:
            links.shape(shaping.Shape(20e6, 0.001))
            with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as stream:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                assert stream.read() == sent[::-1]
        finally:
            links.close()
        thread.join()
    assert got == [sent]


def test_a_closed_port_refuses_through_a_link() -> None:
    port = reserve_port()
    links = shaping.Shaping([shaping.Route("a", "b", port, reserve_port())])
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(1) == b""
    finally:
        links.close()


# -- what is learnt


def served(use: Any, prefix: int, new: int, decode: int, rows: int) -> Any:
    """A batch on a machine with known costs."""
    one = Work(prefix, new, decode, rows)
    cached = 0 if use is PrefixUse.RECOMPUTE else prefix
    first = new if use is not PrefixUse.RECOMPUTE else prefix + new
    nbytes = prefix // 256 * MODEL.segment_bytes
    prefill = 1e-3 + 1e-4 * first + 1e-8 * first * (cached + first / 2) + 1e-6 * cached
    step = 2e-3 + 1e-4 * rows + 1e-6 * rows * (prefix + new)
    pool_s = {PrefixUse.LOCAL: rows * (1e-3 + 1e-10 * nbytes), PrefixUse.RECOMPUTE: 0.0, PrefixUse.SHIP: 0.004}
    pool_s[PrefixUse.FETCH] = pool_s[PrefixUse.LOCAL] + 5e-3 + 2e-8 * nbytes
    at = prefix
    if use is PrefixUse.SHIP:
        prefill = 1e-3 + 1e-4 * new + 1e-8 * new * new / 2 + MODEL.layers * query_s(new, prefix)
        step = 2e-3 + 1e-4 * rows + 1e-6 * rows * new + MODEL.layers * query_s(rows, prefix)
    timed = [passes.Pass(1, first, cached, prefill)] * rows + [passes.Pass(rows, 1, at + new, step)] * decode
    total = pool_s[use] + sum(each.seconds for each in timed)
    return rig.Timed(use, one, total, total, tuple(timed), pool_s[use], 0, (), True)


def query_s(queries: int, cached: int) -> float:
    return 1e-3 + queries * MODEL.query_bytes * 5e-9 + cached * (2e-7 + 1e-8 * queries)


def learnt() -> Rates:
    rates = Rates()
    every = [(768, 32, 8, 1), (2560, 96, 8, 1), (1280, 64, 16, 3), (2560, 24, 24, 2), (768, 96, 24, 3), (256, 8, 8, 4)]
    every += [(512, 200, 4, 2), (3072, 8, 4, 1)]
    measuring.measure(rates, MODEL, [served(use, *work) for use in PrefixUse for work in every])
    return rates


@pytest.mark.parametrize("work", [(1536, 16, 4, 1), (1536, 128, 32, 4), (4096, 16, 32, 2)])
def test_unseen_times_are_predicted_from_others(work: tuple[int, int, int, int]) -> None:
    rates, one = learnt(), Work(*work)
    keys = [SegmentKey(bytes([index])) for index in range(one.prefix // 256)]
    for at, ways in ((rig.OWNER, (PrefixUse.FETCH, PrefixUse.SHIP)), (rig.READER, (PrefixUse.LOCAL,))):
        prediction = judging.predict(one, keys, at, MODEL, rates)
        for use in (*ways, PrefixUse.RECOMPUTE):
            assert prediction.seconds[use.value] == pytest.approx(served(use, *work).seconds, rel=0.05)
        assert prediction.regret == 0
        assert prediction.chosen.value == min(prediction.seconds, key=lambda way: prediction.seconds[way])


def test_what_did_not_arrive_teaches_nothing() -> None:
    rates = Rates()
    one = served(PrefixUse.FETCH, 768, 32, 8, 1)
    broken = rig.Timed(one.use, one.work, 9.0, 9.0, one.passes, 9.0, 0, (), False)
    measuring.measure(rates, MODEL, [broken] * 20)
    assert not rates.peer(NodeId(rig.OWNER)).fetch.known
    assert not rates.prefill.known


# -- rows


def test_regret_and_promise_of_a_row() -> None:
    prediction = judging.Prediction(PrefixUse.FETCH, {"fetch": 0.2, "ship": 0.3, "recompute": 0.4})
    measured = {
        PrefixUse.FETCH: [0.9, 0.3, 0.3],
        PrefixUse.SHIP: [0.2],
        PrefixUse.RECOMPUTE: [0.2],
        PrefixUse.LOCAL: [0.1],
    }
    row = judging.row_of((20e6, 0.001), Work(512, 16, 4, 1), prediction, measured, 0)
    assert (row.chosen, row.best, row.here) == ("fetch", "ship", False)
    assert row.regret == pytest.approx(0.5)
    assert set(row.measured_ms) == {"fetch", "ship", "recompute"}
    assert not row.promise_held
    measured[PrefixUse.RECOMPUTE] = [0.25]
    assert judging.row_of((20e6, 0.001), Work(512, 16, 4, 1), prediction, measured, 0).promise_held


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prefixes": "300"}, "prefixes"),
        ({"bandwidths": "0"}, "bandwidths"),
        ({"delays": "x"}, "delays"),
        ({"new": "256"}, "new"),
        ({"turns": 0}, "turns"),
    ],
)
def test_arguments_that_cannot_be(changed: dict[str, object], named: str) -> None:
    given = {"bandwidths": "20", "delays": "1", "prefixes": "256", "new": "16", "decode": "4", "sharing": "1"}
    with pytest.raises(ConfigurationError, match=named):
        command.PlannerArguments(**{"turns": 1, **given, **changed})


# -- all of it


@pytest.mark.rest
@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_every_way_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a read of the prefix may be given up, which the result names: the benchmark runs again then."""
    monkeypatch.setattr(command, "LEARNT", (Work(256, 8, 2, 1), Work(512, 24, 3, 2)))
    monkeypatch.setattr(command, "LEARNING_TURNS", 4)
    monkeypatch.setattr(command, "DOCUMENT", Work(512, 8, 2, 1))
    monkeypatch.setattr(command, "QUESTIONS", 1)
    arguments = command.PlannerArguments(
        bandwidths="500",
        delays="0.1",
        prefixes="256",
        new="16",
        decode="2",
        sharing="1,2",
        turns=1,
        json_file=tmp_path / "result.json",
        plot_file=tmp_path / "regions.png",
    )
    whole = False
    for _ in range(4):
        result = command.run_planner(arguments)
        assert result.tokens_equal
        assert result.model_regret == 0
        assert [row.here for row in result.rows] == [False, True] * 2
        written = json.loads((tmp_path / "result.json").read_bytes())
        assert written["planner_max_regret"] == result.planner_max_regret
        assert len(written["rows"]) == 4
        moved = {each.way: each.moved_bytes for each in result.documents}
        whole = not any(row.unserved for row in result.rows) and moved["fetch only"] == 2 * 768 << 10
        if whole:
            break
    assert whole, result
    assert 0 < moved["ship only"] < moved["fetch only"]
    assert (tmp_path / "regions.png").read_bytes().startswith(b"\x89PNG")
