"""The directory against a plain dict, operation by operation; its bound, and entries of earlier incarnations."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.directory import Directory, Entry, Standing
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

A, B = NodeId("a"), NodeId("b")
FIRST, SECOND = Incarnation(1), Incarnation(2)
TENANT = TenantId("t")
KEY = SegmentKey(bytes(32))
LIMIT = 4


class Step(NamedTuple):
    act: str
    tenant: TenantId
    key: SegmentKey
    node: NodeId
    incarnation: Incarnation
    deadline: float
    now: float


steps = st.builds(
    Step,
    act=st.sampled_from(["get", "pending", "withdraw", "ready", "held", "gone", "forget", "sweep"]),
    tenant=st.sampled_from([TENANT, TenantId("u")]),
    key=st.sampled_from([SegmentKey(bytes([number]) * 32) for number in range(3)]),
    node=st.sampled_from([A, B]),
    incarnation=st.sampled_from([FIRST, SECOND]),
    deadline=st.integers(0, 20).map(float),
    now=st.integers(0, 20).map(float),
)


class Model:
    """A dict in order of the last change. An expired PENDING entry stays until a query for it, an entry of an earlier
    incarnation until a sweep."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: dict[tuple[TenantId, SegmentKey], Entry] = {}
        self.lives: dict[NodeId, Incarnation] = {}

    def counts(self, entry: Entry) -> bool:
        return self.lives.get(entry.node, entry.incarnation) == entry.incarnation

    def put(self, at: tuple[TenantId, SegmentKey], entry: Entry) -> None:
        self.entries.pop(at, None)
        self.entries[at] = entry
        while len(self.entries) > self.limit:
            del self.entries[next(iter(self.entries))]

    def step(self, step: Step) -> object:
        at = (step.tenant, step.key)
        entry = self.entries.get(at)
        if entry is not None and not self.counts(entry):
            entry = None
        mine = entry is not None and entry.node == step.node
        match step.act, entry:
            case ("get" | "pending", Entry(Standing.PENDING, deadline=deadline)) if deadline <= step.now:
                del self.entries[at]
                entry = None
            case "withdraw", Entry(Standing.PENDING) if mine:
                del self.entries[at]
            case "gone", Entry() if mine:
                del self.entries[at]
            case "ready", Entry(Standing.DIRTY | Standing.PRIMARY, node) if not mine:
                return node
            case "ready", None | Entry(Standing.PENDING | Standing.DIRTY):
                self.put(at, Entry(Standing.DIRTY, step.node, step.incarnation, 0.0))
            case "held", Entry(Standing.PRIMARY, node) if not mine:
                return node
            case "held", _:
                self.put(at, Entry(Standing.PRIMARY, step.node, step.incarnation, 0.0))
            case "forget", _:
                self.lives[step.node] = step.incarnation
            case "sweep", _:
                for other, said in list(self.entries.items()):
                    if not self.counts(said):
                        del self.entries[other]
        if step.act == "pending" and (entry is None or (mine and entry.standing is Standing.PENDING)):
            self.put(at, Entry(Standing.PENDING, step.node, step.incarnation, step.deadline))
        return entry if step.act == "get" else None


def take(directory: Directory, step: Step) -> object:
    tenant, key, node, incarnation = step.tenant, step.key, step.node, step.incarnation
    match step.act:
        case "get":
            return directory.get_all(tenant, [key], step.now)[0]
        case "pending":
            directory.pending(tenant, key, node, incarnation, step.deadline, step.now)
        case "withdraw":
            directory.withdraw(tenant, key, node)
        case "ready":
            return directory.ready(tenant, key, node, incarnation)
        case "held":
            return directory.held(tenant, key, node, incarnation)
        case "gone":
            directory.gone(tenant, key, node)
        case "forget":
            directory.forget(node, incarnation)
        case "sweep":
            while directory.sweep(1):
                pass
    return None


def swept(story: list[Step]) -> list[Step]:
    """The same steps, with a sweep after each `forget`, so that the sweep keeps the order."""
    return [
        after for step in story for after in ([step, step._replace(act="sweep")] if step.act == "forget" else [step])
    ]


@pytest.mark.parametrize("limit", [LIMIT, 100], ids=["bounded", "swept at any time"])
@given(st.lists(steps, max_size=40))
@settings(max_examples=examples(300))
def test_it_behaves_as_a_plain_dict(limit: int, story: list[Step]) -> None:
    directory, model = Directory(limit), Model(limit)
    for step in swept(story) if limit == LIMIT else story:
        if step.act != "forget":
            # A node makes statements in its present incarnation only.
            step = step._replace(incarnation=model.lives.get(step.node, step.incarnation))
        assert take(directory, step) == model.step(step), step
        directory.check_integrity()
        assert len(directory) == len(model.entries), step
    for (tenant, key), entry in list(model.entries.items()):
        # The query has a time before every deadline, so that it drops no expired entry.
        assert directory.get(tenant, key, -1.0) == (entry if model.counts(entry) else None)


@pytest.mark.parametrize(("now", "there"), [(4.999, True), (5.0, False), (6.0, False)])
def test_pending_counts_until_its_deadline(now: float, there: bool) -> None:
    directory = Directory(LIMIT)
    directory.pending(TENANT, KEY, A, FIRST, 5.0, 0.0)
    assert (directory.get(TENANT, KEY, now) is not None) == there
    assert len(directory) == there


def test_a_second_writer_waits_for_the_deadline() -> None:
    directory = Directory(LIMIT)
    directory.pending(TENANT, KEY, A, FIRST, 5.0, 0.0)
    directory.pending(TENANT, KEY, B, FIRST, 9.0, 4.0)
    assert directory.get(TENANT, KEY, 4.0) == Entry(Standing.PENDING, A, FIRST, 5.0)
    directory.pending(TENANT, KEY, B, FIRST, 9.0, 5.0)
    assert directory.get(TENANT, KEY, 5.0) == Entry(Standing.PENDING, B, FIRST, 9.0)


def test_the_first_commit_wins_over_an_announcement() -> None:
    directory = Directory(LIMIT)
    directory.pending(TENANT, KEY, A, FIRST, 5.0, 0.0)
    assert directory.ready(TENANT, KEY, B, FIRST) is None
    assert directory.ready(TENANT, KEY, A, FIRST) == B
    assert directory.held(TENANT, KEY, A, FIRST) is None
    assert directory.held(TENANT, KEY, B, FIRST) == A
    assert directory.ready(TENANT, KEY, B, FIRST) == A


def test_beyond_the_bound_the_oldest_goes() -> None:
    directory = Directory(LIMIT)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(LIMIT + 1)]
    for key in keys[:LIMIT]:
        directory.ready(TENANT, key, A, FIRST)
    directory.held(TENANT, keys[0], A, FIRST)
    directory.ready(TENANT, keys[LIMIT], A, FIRST)
    assert [directory.get(TENANT, key, 0.0) is not None for key in keys] == [True, False, True, True, True]


def test_forget_drops_entries_of_an_earlier_incarnation() -> None:
    directory = Directory(LIMIT)
    early, late, other = (SegmentKey(bytes([number]) * 32) for number in range(3))
    directory.ready(TENANT, early, A, FIRST)
    directory.ready(TENANT, late, A, SECOND)
    directory.ready(TENANT, other, B, FIRST)
    directory.forget(A, SECOND)
    assert [directory.get(TENANT, key, 0.0) is not None for key in (early, late, other)] == [False, True, True]
    assert len(directory) == 3
    assert directory.sweep(2)
    assert not directory.sweep(2)
    assert len(directory) == 2
    assert [directory.get(TENANT, key, 0.0) is not None for key in (early, late, other)] == [False, True, True]


def test_a_sweep_keeps_the_order() -> None:
    directory = Directory(LIMIT)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(LIMIT + 1)]
    directory.ready(TENANT, keys[0], A, FIRST)
    for key in keys[1:LIMIT]:
        directory.ready(TENANT, key, B, FIRST)
    directory.forget(A, SECOND)
    while directory.sweep(1):
        pass
    for key in (keys[0], keys[LIMIT]):
        directory.ready(TENANT, key, A, SECOND)
    assert [directory.get(TENANT, key, 0.0) is not None for key in keys] == [True, False, True, True, True]


def test_entries_made_during_a_sweep_survive_it() -> None:
    directory = Directory(LIMIT)
    early, late, again = (SegmentKey(bytes([number]) * 32) for number in range(3))
    for key in (early, again):
        directory.ready(TENANT, key, A, FIRST)
    directory.forget(A, SECOND)
    assert directory.sweep(1)
    directory.held(TENANT, again, A, SECOND)
    directory.held(TENANT, late, B, FIRST)
    while directory.sweep(1):
        pass
    assert [directory.get(TENANT, key, 0.0) is not None for key in (early, late, again)] == [False, True, True]


def test_tenants_are_separate() -> None:
    directory = Directory(LIMIT)
    directory.ready(TENANT, KEY, A, FIRST)
    assert directory.get(TenantId("u"), KEY, 0.0) is None


def test_previous_owners_are_bounded_and_the_latest_counts() -> None:
    directory = Directory(8)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(3)]
    for key in keys:
        directory.remember(TENANT, key, A)
        directory.check_integrity()
    assert [directory.previous_owner(TENANT, key) for key in keys] == [None, A, A]
    directory.remember(TENANT, keys[1], B)
    directory.remember(TENANT, keys[0], A)
    assert [directory.previous_owner(TENANT, key) for key in keys] == [A, B, None]
    assert directory.previous_owner(TenantId("u"), keys[1]) is None
