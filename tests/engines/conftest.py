"""Engine tests need torch and transformers; without the extra they are skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tokenlake_client import Pool

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _patient_matches() -> Iterator[None]:
    """A longer deadline of a match: on a busy machine a process may not run for 20 ms."""
    defaults = Pool.match.__kwdefaults__
    Pool.match.__kwdefaults__ = {**(defaults or {}), "deadline_s": 2.0}
    yield
    Pool.match.__kwdefaults__ = defaults


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
