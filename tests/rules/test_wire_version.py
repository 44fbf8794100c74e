"""The protocol version that two sides agree on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import PROTOCOL_VERSION, agree
from tokenlake.wire.version import OLDEST_VERSION


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_highest_common_version_is_used(oldest: int, newest: int) -> None:
    mine = set(range(OLDEST_VERSION, PROTOCOL_VERSION + 1))
    both = mine & set(range(oldest, newest + 1))
    if both:
        assert agree(oldest, newest) == max(both)
    else:
        with pytest.raises(ProtocolRefused, match=f"versions {oldest} to {newest}, this side {OLDEST_VERSION} to"):
            agree(oldest, newest)
