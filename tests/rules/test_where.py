"""The names of places, and the devices that they are."""

from __future__ import annotations

import pytest

from tokenlake.where import HOST, device_of
from tokenlake.wire import places


@pytest.mark.parametrize(("where", "device"), [(HOST, places.HOST), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_place_is_the_host_or_a_gpu(where: str, device: int) -> None:
    assert device_of(where) == device


@pytest.mark.parametrize("where", ["", "cuda", "cuda:", "cuda:-1", "cuda:x", "rocm:0", "hosts"])
def test_another_text_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match="is no place"):
        device_of(where)
