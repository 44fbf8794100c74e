"""The cluster machine with long work cut in slices of two items, so that other events come between two slices."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.profiles import examples
from tests.sim.test_cluster_machine import ClusterMachine
from tests.sim.test_kept_machine import KeptClusterMachine
from tokenlake.core import kept, ledger
from tokenlake.core.cluster import directory_node, found, serve, transfers
from tokenlake.core.engines import access, sessions


@pytest.mark.parametrize(("machine", "count"), [(ClusterMachine, 25), (KeptClusterMachine, 25)])
def test_work_in_slices_of_two(machine: type[ClusterMachine], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_node, "WALKED_SLOTS", 2)
    monkeypatch.setattr(directory_node, "SWEPT_ENTRIES", 2)
    monkeypatch.setattr(serve, "SLICE", 2)
    monkeypatch.setattr(sessions, "PIECE", 2)
    monkeypatch.setattr(transfers, "SETTLED", 2)
    monkeypatch.setattr(access, "REPORTS", 2)
    monkeypatch.setattr(kept, "RELEASED", 2)
    monkeypatch.setattr(found, "TOLD", 2)
    monkeypatch.setattr(ledger, "SEALED", 2)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(count), stateful_step_count=30))
