"""The parts of the simulator, each on its own, and the command on a small trace."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tokenlake.keys import KEY_BYTES
from tokenlake.wire import peer
from tokenlake_bench import balance
from tokenlake_bench.simulation import hot
from tokenlake_bench.simulation.arrivals import Arrival, flash_crowd, keys_of, merged
from tokenlake_bench.simulation.late_load import LateLoad
from tokenlake_bench.simulation.meter import Meter, filled
from tokenlake_bench.simulation.network import Link, Network, NetworkShape
from tokenlake_testing.clock import Clock

MB = 10**6


def chain(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


# -- clock


def test_callbacks_run_in_order_of_time_then_of_scheduling() -> None:
    clock, happened = Clock(), list[tuple[float, str]]()

    def note(what: str) -> None:
        happened.append((clock.now, what))
        if what == "b":
            clock.at(0.0, note, "late")

    clock.after(2.0, note, "c")
    clock.at(1.0, note, "a")
    clock.at(1.0, note, "b")
    clock.at(9.0, note, "never")
    clock.run_until(5.0)
    assert happened == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]
    assert clock.now == 5.0


# -- network


def test_a_node_sends_one_transfer_after_the_other() -> None:
    network = Network(NetworkShape(usual=Link(latency_s=0.001, bandwidth=100 * MB)), 3)
    assert network.transfer(0.0, 0, 1, 10 * MB) == pytest.approx((0.1, 0.101))
    assert network.transfer(0.0, 0, 2, 10 * MB) == pytest.approx((0.2, 0.201))
    # The link is idle again, so that this transfer waits for no other.
    assert network.transfer(5.0, 0, 1, 10 * MB) == pytest.approx((5.1, 5.101))
    assert (network.transfers, network.nbytes) == (3, 30 * MB)


def test_a_node_receives_one_transfer_after_the_other() -> None:
    network = Network(NetworkShape(usual=Link(latency_s=0.001, bandwidth=100 * MB)), 3)
    assert network.transfer(0.0, 0, 2, 10 * MB) == pytest.approx((0.1, 0.101))
    assert network.transfer(0.0, 1, 2, 10 * MB) == pytest.approx((0.1, 0.201))


def test_a_slow_link_is_slow_in_one_direction() -> None:
    slow = Link(latency_s=0.5, bandwidth=10 * MB)
    network = Network(NetworkShape(usual=Link(0.001, 100 * MB), links={(0, 1): slow}), 2)
    assert network.link(0, 1) is slow
    assert network.transfer(0.0, 0, 1, 10 * MB) == pytest.approx((1.0, 1.5))
    assert network.transfer(0.0, 1, 0, 10 * MB) == pytest.approx((0.1, 0.101))


# -- late load


class Report(msgspec.Struct, frozen=True):
    number: int
    load: float


def test_loads_are_delayed_and_other_fields_are_not() -> None:
    late = LateLoad(1.0, 2)
    said = [(0.0, 5.0), (0.5, 6.0), (1.0, 7.0), (1.4, 8.0), (1.6, 9.0), (9.0, 1.0)]
    heard = [late.pass_on(at, 0, Report(number, load)) for number, (at, load) in enumerate(said)]
    assert [report.number for report in heard] == [0, 1, 2, 3, 4, 5]
    assert [report.load for report in heard] == [0.0, 0.0, 5.0, 5.0, 6.0, 9.0]
    assert late.pass_on(9.0, 1, Report(6, 3.0)).load == 0.0
    told = peer.Evicted("default", b"", "n0000")
    assert late.pass_on(9.0, 0, told) is told


# -- arrivals


def test_keys_are_uniform_and_depend_on_number_and_seed() -> None:
    keys = keys_of(np.arange(20_000), 0)
    assert len({keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}) == 20_000
    assert keys_of(chain(7), 0) == keys[7 * KEY_BYTES : 8 * KEY_BYTES] != keys_of(chain(7), 1)
    words = np.frombuffer(keys, dtype=">u8").reshape(-1, 4) / 2.0**64
    assert words.mean(axis=0) == pytest.approx([0.5] * 4, abs=0.01)
    assert np.abs(np.corrcoef(words.T) - np.eye(4)).max() < 0.03


def test_copies_share_templates_only_and_are_shifted() -> None:
    arrivals = [Arrival(float(at), 1000, chain(0, 100 + at)) for at in range(100)]
    many = list(merged(arrivals, 4, common_share=0.5))
    assert len(many) == 400
    assert [arrival.at_s for arrival in many] == sorted(arrival.at_s for arrival in many)
    assert {int(arrival.chain[0]) for arrival in many} == {0}
    assert len({int(arrival.chain[1]) for arrival in many}) == 400
    # Each quarter of the time has four times the requests of the original.
    counts, _ = np.histogram([arrival.at_s for arrival in many], bins=4, range=(0, 100))
    assert counts.tolist() == pytest.approx([100] * 4, abs=4)


def test_one_copy_is_the_workload_itself() -> None:
    arrivals = [Arrival(float(at), 1000, chain(0, 100 + at)) for at in range(10)]
    for mine, theirs in zip(merged(arrivals, 1), arrivals, strict=True):
        assert (mine.at_s, mine.tokens, mine.chain.tolist()) == (theirs.at_s, theirs.tokens, theirs.chain.tolist())


def test_a_flash_crowd_begins_in_time_and_has_one_new_prefix() -> None:
    arrivals = [Arrival(float(at), 1000, chain(at % 7)) for at in range(1000)]
    crowd = list(flash_crowd(arrivals, 500.0, 512, seed=0))
    joined = [at for at, arrival in enumerate(crowd) if len(arrival.chain) > 1]
    assert min(joined) >= 500
    assert len(joined) == pytest.approx(150, abs=30)
    assert len({tuple(crowd[at].chain[:12].tolist()) for at in joined}) == 1
    assert all(crowd[at].tokens == 1000 + 12 * 512 for at in joined)
    # In the crowd, the segments behind the new prefix have new numbers: equal ones for requests whose segments were
    # equal.
    old = {number for arrival in arrivals for number in arrival.chain.tolist()}
    assert len({int(crowd[at].chain[12]) for at in joined} - old) == 7


# -- meter


def test_reads_are_seen_by_window_and_in_logs() -> None:
    meter = Meter(2, 100, begins_s=10.0)
    meter.read(11.0, 0, 0, keys_of(chain(1, 2, 3), 0))
    meter.read(21.0, 1, 0, keys_of(chain(1), 0))
    meter.read(22.0, 0, 1, keys_of(chain(4), 0))
    first, second = meter.windows()
    assert (first.from_s, first.mean, first.max_over_mean, first.cv) == (0.0, 1.5, 2.0, 1.0)
    assert (second.from_s, second.mean, second.max_over_mean, second.cv) == (10.0, 1.0, 1.0, 0.0)
    assert balance.load_of_nodes(meter.log(0.0, 10.0)) == [300, 0]
    assert balance.load_of_nodes(meter.log(0.0, 20.0)) == [400, 100]
    assert balance.load_of_nodes(meter.log_of_readers(0.0, 20.0)) == [400, 100]
    assert balance.load_of_nodes(meter.log_of_readers(10.0, 20.0)) == [100, 100]
    assert balance.load_of_nodes(meter.log_of_sent(0.0, 20.0)) == [100, 100]


def test_what_travels_is_poured_in_where_least_is_read() -> None:
    assert filled(np.array([5, 1, 3]), 0).tolist() == [5, 1, 3]
    assert filled(np.array([5, 1, 3]), 2).tolist() == [5, 3, 3]
    assert filled(np.array([5, 1, 3]), 4).tolist() == [5, 4, 4]
    assert filled(np.array([5, 1, 3]), 9).tolist() == [6, 6, 6]
    assert filled(np.array([2, 2]), 1).tolist() == [2.5, 2.5]


def test_at_best_own_reads_stay_and_the_rest_is_even() -> None:
    meter = Meter(2, 100, begins_s=0.0)
    meter.read(1.0, 0, 0, keys_of(chain(1, 2, 3), 0))
    meter.read(2.0, 0, 1, keys_of(chain(1, 2), 0))
    # Node 0 has 3 local reads and node 1 none; 2 remote reads can be distributed: at best 3 and 2.
    assert meter.at_best(0.0, 10.0).max_over_mean == pytest.approx(3 / 2.5)
    assert balance.spread(meter.log(0.0, 10.0)).max_over_mean == 2.0


# -- the command


def test_the_command_measures_each_mode_and_writes_json(tmp_path: Path) -> None:
    trace, json_file = tmp_path / "small.jsonl", tmp_path / "hot.json"
    draw = random.Random(0)
    lengths = [draw.randint(1, 8) for _ in range(400)]
    lines = [
        {"timestamp": 100 * at, "input_length": 512 * length, "output_length": 1, "hash_ids": [*range(length)]}
        for at, length in enumerate(lengths)
    ]
    trace.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    arguments = ["--trace", str(trace), "--nodes", "3", "--hot", "off,on", "--warm-s", "10", "--steady-s", "10"]
    more = ["--crowd-s", "20", "--node-tokens", "100000", "--json", str(json_file)]
    done = CliRunner().invoke(hot.main, [*arguments, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "crowd window 2" in done.output
    result = msgspec.json.decode(json_file.read_bytes(), type=hot.HotResult)
    assert [row.hot for row in result.rows] == ["off", "on"]
    for row in result.rows:
        assert (row.steady.from_s, row.steady.to_s) == (10.0, 20.0)
        assert [measured.from_s for measured in row.crowd] == [20.0, 30.0]
        assert row.steady.token_hit_rate > 0.5
        assert row.steady.load_cv > 0
    # The jitter moves some of the last requests beyond the end.
    assert 360 < result.rows[0].totals.requests == result.rows[1].totals.requests <= 400


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--warm-s", "5", "warm_s"),
        ("--steady-s", "0", "steady_s"),
        ("--hot", "perhaps", "hot"),
        ("--nodes", "0", "nodes"),
        ("--rate", "0", "rate"),
    ],
)
def test_arguments_without_meaning_are_refused_by_name(tmp_path: Path, flag: str, value: str, named: str) -> None:
    trace = tmp_path / "small.jsonl"
    trace.write_bytes(msgspec.json.encode({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}))
    done = CliRunner().invoke(hot.main, ["--trace", str(trace), flag, value])
    assert done.exit_code == 1
    assert named in done.output
