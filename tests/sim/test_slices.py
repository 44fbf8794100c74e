"""The cluster machine again, with long work cut in slices of two: whatever happens between two of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.test_cluster_machine import ClusterMachine
from tokenlake.core import advertising, peers, pushes, serving, sessions


def test_work_in_slices_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advertising, "SLOTS", 2)
    monkeypatch.setattr(pushes, "ADOPT_SLOTS", 2)
    monkeypatch.setattr(peers, "SWEPT", 2)
    monkeypatch.setattr(serving, "SLICE", 2)
    monkeypatch.setattr(sessions, "SLICE", 2)
    run_state_machine_as_test(ClusterMachine, settings=settings(max_examples=40, stateful_step_count=30))
