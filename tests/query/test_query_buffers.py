"""Buffers for the queries of one connection."""

from __future__ import annotations

from tokenlake_query.query_buffers import MAX_PENDING_BYTES, MAX_SPARE_BYTES, QueryBuffers


def test_a_large_query_keeps_no_memory() -> None:
    """A connection may live for days, and no tenant's limits count its spare buffers."""
    buffers = QueryBuffers()
    for nbytes in (MAX_PENDING_BYTES, MAX_SPARE_BYTES + 1):
        buffers.give_back(buffers.take(nbytes, 0), 0)
    assert buffers.spare_bytes == 0
    taken = [buffers.take(MAX_SPARE_BYTES // 2, 0) for _ in range(3)]
    for buffer in taken:
        buffers.give_back(buffer, 0)
    assert buffers.spare_bytes <= MAX_SPARE_BYTES
    again = buffers.take(MAX_SPARE_BYTES // 2, 0)
    assert any(again is buffer for buffer in taken), "small buffers are used again"
