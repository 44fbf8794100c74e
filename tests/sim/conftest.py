"""Settings of all simulated clusters."""

from __future__ import annotations

import pytest

from tokenlake.core.cluster import handover


@pytest.fixture(autouse=True)
def _skew_lasts_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few simulated seconds reach hand-overs."""
    monkeypatch.setattr(handover, "LASTING_S", 0.3)
