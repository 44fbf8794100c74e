"""A daemon that has no descriptor left says so to who wants one, and serves the others."""

from __future__ import annotations

import resource

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, outcomes, read, store
from tokenlake.errors import LimitReached
from tokenlake.wire import Code

pytestmark = pytest.mark.live


def test_a_region_is_not_to_be_had_for_want_of_a_descriptor() -> None:
    """The request was never answered: its engine waited, and took the daemon for frozen."""
    prompt = Prompt(1, 4)
    with daemons() as cluster, cluster.connect(0, LAYOUT) as pool:
        process = cluster.nodes[0].process
        assert process is not None
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(LimitReached, match="OpenRegion now: Too many open files"):
            pool.store(pool.prefix(prompt.tokens).keys)
        assert pool.timeouts == 0
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
