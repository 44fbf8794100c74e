"""A flash crowd on top of a workload."""

from __future__ import annotations

import numpy as np
import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.flash import FLASH_SEGMENTS, FLASH_SHARE, FlashCrowd
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

PLAIN = builtin_workload(BuiltinSettings(requests=2_000, seed=3))
AT_S = 300.0


def test_only_later_requests_change_and_keep_their_own_tokens() -> None:
    changed = 0
    for plain, request in zip(PLAIN, FlashCrowd(PLAIN, AT_S, 64, 1), strict=True):
        own = len(request.tokens) - len(plain.tokens)
        assert own in (0, FLASH_SEGMENTS * 64)
        assert own == 0 or plain.at_s >= AT_S
        assert np.array_equal(request.tokens[own:], plain.tokens)
        changed += own > 0
    later = sum(request.at_s >= AT_S for request in PLAIN)
    assert 0.8 * FLASH_SHARE < changed / later < 1.2 * FLASH_SHARE


def test_the_crowd_shares_a_prefix_and_iterations_are_equal() -> None:
    crowd = FlashCrowd(PLAIN, 0.0, 64, 1)
    heads = {
        request.tokens[: FLASH_SEGMENTS * 64].tobytes()
        for plain, request in zip(PLAIN, crowd, strict=True)
        if len(request.tokens) > len(plain.tokens)
    }
    assert len(heads) == 1
    assert [len(request.tokens) for request in crowd] == [len(request.tokens) for request in crowd]
    assert len(crowd) == len(PLAIN)


@pytest.mark.parametrize("at_s", [-1.0, float("nan"), float("inf")])
def test_a_moment_without_meaning_is_refused(at_s: float) -> None:
    with pytest.raises(ConfigurationError, match="setting 'flash_at'"):
        FlashCrowd(PLAIN, at_s, 64, 1)
