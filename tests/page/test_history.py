"""The samples of the page: rates, and the events that follow from changes."""

from __future__ import annotations

from typing import Any

from tokenlake_server.page.history import MAX_EVENTS, MAX_SAMPLES, History, Sample


def sample(at: float, counts: tuple[int, ...] = (0,) * 7, **given: Any) -> Sample:
    made = Sample(
        at,
        1e9 + at,
        counts,
        epoch=1,
        members=frozenset({"a", "b"}),
        peers={"b": ("connected", "")},
        engines=1,
        problem="",
        disks={"/d": (True, "")},
    )
    return made._replace(**given)


def texts(history: History, *, of_all: bool = True) -> list[str]:
    return [each.text for each in history.events(64, of_all=of_all)]


def test_rates_are_those_of_the_intervals() -> None:
    history = History("a")
    history.add(sample(0.0))
    history.add(sample(5.0, (100, 50, 25, 1000, 500, 0, 0)))
    history.add(sample(15.0, (200, 50, 25, 1000, 1500, 0, 0)))
    rates = history.rates()
    assert rates.end_s == [1e9 + 5, 1e9 + 15]
    assert (rates.supplied, rates.engine_had, rates.missed) == ([20.0, 10.0], [10.0, 0.0], [5.0, 0.0])
    assert (rates.sent, rates.received) == ([200.0, 0.0], [100.0, 100.0])


def test_each_change_is_an_event() -> None:
    history = History("a")
    history.add(sample(0.0))
    history.add(sample(5.0, peers={"b": ("unreachable", "refused")}, engines=3))
    history.add(sample(10.0, epoch=2, members=frozenset({"a", "c"}), peers={"c": ("connected", "")}, engines=3))
    history.add(sample(15.0, epoch=2, members=frozenset({"a", "c"}), peers={"c": ("connected", "")}, engines=3,
                       problem="etcd is away", disks={"/d": (False, "full")}))  # fmt: skip
    assert texts(history) == [
        "/d does not serve: full",
        "etcd is away",
        "'c' is connected",
        "epoch 2 of the ring, 2 nodes; joined: c; left: b",
        "3 engines, before 1",
        "'b' is unreachable: refused",
        "node 'a' runs, epoch 1 of the ring",
    ]
    severities = [each.severity for each in history.events(64, of_all=True)]
    assert severities == ["warning", "warning", "info", "info", "info", "warning", "info"]


def test_segments_of_a_minute_are_one_event() -> None:
    history = History("a")
    for number in range(30):
        history.add(sample(5.0 * number, (0, 0, 0, 0, 0, 10 * number, number)))
    assert texts(history) == [
        "50 segments stored, 5 evicted",
        "120 segments stored, 12 evicted",
        "120 segments stored, 12 evicted",
        "node 'a' runs, epoch 1 of the ring",
    ]
    assert texts(history, of_all=False) == ["node 'a' runs, epoch 1 of the ring"]


def test_the_past_is_bounded() -> None:
    history = History("a")
    for number in range(2 * MAX_SAMPLES):
        state = "connected" if number % 2 else "unreachable"
        history.add(sample(5.0 * number, peers={"b": (state, "r" * 10_000)}))
    assert len(history.rates().end_s) == MAX_SAMPLES - 1
    events = history.events(1 << 20, of_all=True)
    assert len(events) == MAX_EVENTS
    assert max(len(each.text) for each in events) <= 500
