"""The parts of the simulator, each on its own."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.hints import DEMOTE, RETAIN
from tokenlake.keys import KEY_BYTES
from tokenlake_bench.simulation.acts import with_acts
from tokenlake_bench.simulation.arrivals import FLASH_SHARE, Arrival, keys_of, merged, with_flash, with_swarms
from tokenlake_bench.simulation.network import Link, Network
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
    network = Network(Link(latency_s=0.001, bandwidth=100 * MB), 3)
    assert network.transfer(0.0, 0, 1, 10 * MB) == pytest.approx((0.1, 0.101))
    assert network.transfer(0.0, 0, 2, 10 * MB) == pytest.approx((0.2, 0.201))
    # The link is idle again, so that this transfer waits for no other.
    assert network.transfer(5.0, 0, 1, 10 * MB) == pytest.approx((5.1, 5.101))
    assert (network.transfers, network.nbytes) == (3, 30 * MB)


def test_a_node_receives_one_transfer_after_the_other() -> None:
    network = Network(Link(latency_s=0.001, bandwidth=100 * MB), 3)
    assert network.transfer(0.0, 0, 2, 10 * MB) == pytest.approx((0.1, 0.101))
    assert network.transfer(0.0, 1, 2, 10 * MB) == pytest.approx((0.1, 0.201))


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


def test_the_requests_of_a_flash_crowd_share_one_new_prefix() -> None:
    plain = [Arrival(float(at), 1024, np.array([at, 1000 + at])) for at in range(1000)]
    crowd = list(with_flash(plain, 500.0, 512, seed=3))
    assert [each.at_s for each in crowd] == [each.at_s for each in plain]
    joined = [each for each, was in zip(crowd, plain, strict=True) if each.tokens != was.tokens]
    assert joined[0].at_s >= 500.0
    assert len(joined) == pytest.approx(FLASH_SHARE * 500, rel=0.2)
    chains = [each.chain.tolist() for each in joined]
    assert len({tuple(chain[:12]) for chain in chains}) == 1
    assert {each.tokens for each in joined} == {1024 + 12 * 512}
    behind = [number for chain in chains for number in chain[12:]]
    assert len(behind) == len(set(behind)) == 2 * len(joined)
    assert not {number for each in plain for number in each.chain.tolist()} & {*behind, *chains[0]}


def test_acts_name_the_prompts_that_go_on() -> None:
    """The second request continues the first one; the third shares its first segment only."""
    plain = [Arrival(float(at), 2000, np.array(numbers)) for at, numbers in enumerate([[0, 1], [0, 1, 2], [0, 3], []])]
    said = [each.hints for each in with_acts(plain, "both", 1.0, seed=0)]
    assert said == [RETAIN, DEMOTE, DEMOTE, DEMOTE]
    assert [each.hints for each in with_acts(plain, "both", 0.0, seed=0)] == [DEMOTE, RETAIN, RETAIN, RETAIN]
    assert [each.hints for each in with_acts(plain, "demote", 1.0, seed=0)] == [None, DEMOTE, DEMOTE, DEMOTE]


def test_the_requests_of_a_swarm_share_one_new_prefix() -> None:
    first = Arrival(0.0, 512, np.array([7]))
    answered = Arrival(50.0, 1024, np.array([7, 8]), follows=0, pause_s=1.0)
    follower = Arrival(61.0, 1536, np.array([7, 8, 9]), follows=1, pause_s=2.0)
    mixed = list(with_swarms([first, answered, follower], 4, 512, seed=3))
    assert [each.at_s for each in mixed] == sorted(each.at_s for each in mixed)
    assert len(mixed) == 3 + 3 * 4
    assert [mixed[each.follows].at_s for each in mixed if each.follows is not None] == [0.0, 50.0]
    for begins_s in (20.0, 40.0, 60.0):
        swarm = [each for each in mixed if begins_s <= each.at_s < begins_s + 0.5]
        chains = [each.chain.tolist() for each in swarm]
        assert len(swarm) == 4
        assert len({tuple(chain[:32]) for chain in chains}) == 1
        behind = [number for chain in chains for number in chain[32:]]
        assert len(behind) == len(set(behind)) > 0
        others = {
            number for each in mixed if not begins_s <= each.at_s < begins_s + 0.5 for number in each.chain.tolist()
        }
        assert not others & {number for chain in chains for number in chain}
