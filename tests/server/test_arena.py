"""The memory regions: what the kernel takes back."""

from __future__ import annotations

import fcntl
import logging
import os

import pytest

from tokenlake.store.region import PAGE
from tokenlake_server.arena import Region


def test_freed_pages_read_as_zeros() -> None:
    region = Region(0, 4 * PAGE, huge_pages=False)
    region.view[:] = b"\1" * (4 * PAGE)
    region.free_pages([(PAGE, 2 * PAGE)])
    assert [region.view[number * PAGE] for number in range(4)] == [0, 1, 0, 0]
    region.close()


def test_memory_that_is_not_taken_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel frees no page of a memfd that is sealed against writes."""
    region = Region(7, PAGE, huge_pages=False)
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.dup2(fd, region.fd, inheritable=False)
    os.close(fd)
    with caplog.at_level(logging.ERROR):
        region.free_pages()
    assert f"{PAGE} bytes of region 7 are still allocated: Operation not permitted" in caplog.text
    region.close()
