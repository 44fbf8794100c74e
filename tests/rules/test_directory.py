"""The directory against a plain dict, operation by operation; its bound, and entries of earlier incarnations."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tokenlake.directory import entries as module
from tokenlake.directory.entries import Directory, Entry
from tokenlake.hints import NO_ACCESS
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

A, B = NodeId("a"), NodeId("b")
FIRST, SECOND = Incarnation(1), Incarnation(2)
TENANT = TenantId("t")
KEY = SegmentKey(bytes(32))
LIMIT = 2


class Step(NamedTuple):
    act: str
    tenant: TenantId
    key: SegmentKey
    node: NodeId
    incarnation: Incarnation
    deadline: float
    now: float
    previous: NodeId | None


steps = st.builds(
    Step,
    act=st.sampled_from(["get", "mark", "clear", "own", "gone", "forget", "sweep"]),
    tenant=st.sampled_from([TENANT, TenantId("u")]),
    key=st.sampled_from([SegmentKey(bytes([number]) * 32) for number in range(3)]),
    node=st.sampled_from([A, B]),
    incarnation=st.sampled_from([FIRST, SECOND]),
    deadline=st.integers(1, 20).map(float),
    now=st.integers(0, 20).map(float),
    previous=st.sampled_from([None, A, B]),
)


class Model:
    """A dict in order of the last change. An expired in-flight marker stays until a query for it, an entry of an
    earlier incarnation until a sweep."""

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
            case (("get" | "mark"), Entry(deadline=deadline)) if 0 < deadline <= step.now:
                del self.entries[at]
                entry = None
            case "clear", Entry(deadline=deadline) if mine and deadline:
                del self.entries[at]
            case "gone", Entry() if mine:
                del self.entries[at]
            case "own", Entry(node, deadline=0.0) if node not in (step.node, step.previous):
                return node
            case "own", _:
                self.put(at, Entry(step.node, step.incarnation))
            case "forget", _:
                self.lives[step.node] = step.incarnation
            case "sweep", _:
                for other, said in list(self.entries.items()):
                    if not self.counts(said):
                        del self.entries[other]
        if step.act == "mark" and (entry is None or (mine and entry.deadline)):
            self.put(at, Entry(step.node, step.incarnation, step.deadline))
        return entry if step.act == "get" else None


def take(directory: Directory, step: Step) -> object:
    tenant, key, node, incarnation = step.tenant, step.key, step.node, step.incarnation
    match step.act:
        case "get":
            return directory.get_all(tenant, [key], step.now)[0]
        case "mark":
            directory.mark(tenant, key, node, incarnation, step.deadline, step.now)
        case "clear":
            directory.clear(tenant, key, node)
        case "own":
            return directory.own(tenant, key, node, incarnation, step.previous)
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


def test_a_hand_over_replaces_the_previous_owner_only() -> None:
    directory = Directory(LIMIT)
    directory.own(TENANT, KEY, A, FIRST)
    assert directory.own(TENANT, KEY, B, FIRST, previous=A) is None
    assert directory.get(TENANT, KEY, 0.0) == Entry(B, FIRST)
    # A statement of `previous` about another node changes nothing.
    assert directory.own(TENANT, KEY, NodeId("c"), FIRST, previous=A) == B


def test_the_markers_of_a_tenant_push_out_no_entry_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MARKERS", 3)
    directory = Directory(9)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(10)]
    for number in range(4):
        directory.own(TenantId("u"), keys[number], A, FIRST)
    directory.own(TENANT, keys[0], A, FIRST)
    for number in range(1, 9):
        directory.mark(TENANT, keys[number], A, FIRST, 5.0, 1.0)
        directory.check_integrity()
    assert [directory.get(TenantId("u"), keys[number], 1.0) for number in range(4)] == [Entry(A, FIRST)] * 4
    assert directory.get(TENANT, keys[0], 1.0) == Entry(A, FIRST)
    there = [number for number in range(1, 9) if directory.get(TENANT, keys[number], 1.0) is not None]
    assert there == [6, 7, 8]
    directory.own(TENANT, keys[7], A, FIRST)
    directory.mark(TENANT, keys[9], A, FIRST, 5.0, 1.0)
    assert directory.get(TENANT, keys[6], 1.0) is not None, "an owned segment is no marker any more"
    directory.check_integrity()
    directory.forget(A, SECOND)
    assert not directory.sweep(100)
    assert len(directory) == 0
    directory.check_integrity()


def test_the_history_grows_with_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_HISTORY", 2)
    directory = Directory(100)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(40)]

    def remembered() -> list[int]:
        return [at for at, key in enumerate(keys) if directory.last_access(TENANT, [key]) is not None]

    for key in keys[:4]:
        directory.remember(TENANT, key, NO_ACCESS, 0.0)
    assert remembered() == [2, 3]
    for key in keys[:5]:
        directory.own(TENANT, key, A, FIRST)
    for key in keys[4:20]:
        directory.remember(TENANT, key, NO_ACCESS, 0.0)
    assert remembered() == [15, 16, 17, 18, 19]
    for key in keys[:4]:
        directory.gone(TENANT, key, A)
    for key in keys[20:24]:
        directory.remember(TENANT, key, NO_ACCESS, 0.0)
    assert remembered() == [22, 23]
    directory.check_integrity()
