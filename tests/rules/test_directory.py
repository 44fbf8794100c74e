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
    """Owners in the order of the last change, and markers. A marker that does not count stays until a query for it, an
    owner of an earlier incarnation until a sweep."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.owners: dict[tuple[TenantId, SegmentKey], Entry] = {}
        self.markers: dict[tuple[TenantId, SegmentKey], Entry] = {}
        self.lives: dict[NodeId, Incarnation] = {}

    def counts(self, entry: Entry | None) -> bool:
        return entry is not None and self.lives.get(entry.node, entry.incarnation) == entry.incarnation

    def step(self, step: Step) -> object:
        at = (step.tenant, step.key)
        owner, marker = self.owners.get(at), self.markers.get(at)
        match step.act:
            case "get" | "mark":
                if not self.counts(owner) and marker and not (self.counts(marker) and marker.deadline > step.now):
                    marker = self.markers.pop(at) and None
                entry = owner if self.counts(owner) else marker
                if step.act == "get":
                    return entry
                if entry is None or (entry.deadline and entry.node == step.node):
                    self.markers[at] = Entry(step.node, step.incarnation, step.deadline)
            case "clear" if marker and marker.node == step.node and self.counts(marker):
                del self.markers[at]
            case "gone" if owner and owner.node == step.node and self.counts(owner):
                del self.owners[at]
            case "own" if owner and self.counts(owner) and owner.node not in (step.node, step.previous):
                return {step.key: owner.node}
            case "own":
                self.markers.pop(at, None)
                self.owners.pop(at, None)
                self.owners[at] = Entry(step.node, step.incarnation)
                if len(self.owners) > self.limit:
                    del self.owners[next(iter(self.owners))]
            case "forget":
                self.lives[step.node] = step.incarnation
            case "sweep":
                self.owners = {other: said for other, said in self.owners.items() if self.counts(said)}
        return {} if step.act == "own" else None


def take(directory: Directory, step: Step) -> object:
    tenant, key, node, incarnation = step.tenant, step.key, step.node, step.incarnation
    match step.act:
        case "get":
            return directory.get_all(tenant, [key], step.now)[0]
        case "mark":
            directory.mark(tenant, [key], node, incarnation, step.deadline, step.now)
        case "clear":
            directory.clear(tenant, [key], node)
        case "own":
            return directory.own(tenant, [key], node, incarnation, step.previous)
        case "gone":
            directory.gone(tenant, [key], node)
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
        assert len(directory) == len(model.owners) + len(model.markers), step
    for tenant, key in [*model.owners, *model.markers]:
        # The query has a time before every deadline, so that it drops no expired entry.
        owner, marker = model.owners.get((tenant, key)), model.markers.get((tenant, key))
        expected = next((each for each in (owner, marker) if model.counts(each)), None)
        assert directory.get(tenant, key, -1.0) == expected


def test_a_hand_over_replaces_the_previous_owner_only() -> None:
    directory = Directory(LIMIT)
    directory.own(TENANT, [KEY], A, FIRST)
    assert directory.own(TENANT, [KEY], B, FIRST, previous=A) == {}
    assert directory.get(TENANT, KEY, 0.0) == Entry(B, FIRST)
    # A statement of `previous` about another node changes nothing.
    assert directory.own(TENANT, [KEY], NodeId("c"), FIRST, previous=A) == {KEY: B}


def test_the_markers_of_a_tenant_push_out_no_entry_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MARKERS", 3)
    directory = Directory(9)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(10)]
    for number in range(4):
        directory.own(TenantId("u"), [keys[number]], A, FIRST)
    directory.own(TENANT, [keys[0]], A, FIRST)
    for number in range(1, 9):
        directory.mark(TENANT, [keys[number]], A, FIRST, 5.0, 1.0)
        directory.check_integrity()
    assert [directory.get(TenantId("u"), keys[number], 1.0) for number in range(4)] == [Entry(A, FIRST)] * 4
    assert directory.get(TENANT, keys[0], 1.0) == Entry(A, FIRST)
    there = [number for number in range(1, 9) if directory.get(TENANT, keys[number], 1.0) is not None]
    assert there == [6, 7, 8]
    directory.own(TENANT, [keys[7]], A, FIRST)
    directory.mark(TENANT, [keys[9]], A, FIRST, 5.0, 1.0)
    assert directory.get(TENANT, keys[6], 1.0) is not None, "an owned segment is no marker any more"
    directory.check_integrity()


def test_the_history_grows_with_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_HISTORY", 2)
    directory = Directory(100)
    keys = [SegmentKey(bytes([number]) * 32) for number in range(40)]

    def remembered() -> list[int]:
        return [at for at, key in enumerate(keys) if directory.last_access(TENANT, [key]) is not None]

    for key in keys[:4]:
        directory.remember(TENANT, [key], NO_ACCESS, 0.0)
    assert remembered() == [2, 3]
    for key in keys[:5]:
        directory.own(TENANT, [key], A, FIRST)
    for key in keys[4:20]:
        directory.remember(TENANT, [key], NO_ACCESS, 0.0)
    assert remembered() == [15, 16, 17, 18, 19]
    for key in keys[:4]:
        directory.gone(TENANT, [key], A)
    for key in keys[20:24]:
        directory.remember(TENANT, [key], NO_ACCESS, 0.0)
    assert remembered() == [22, 23]
    directory.check_integrity()
