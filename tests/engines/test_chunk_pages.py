"""Chunks between slots and the pages of vLLM's cache, in host memory and on a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tokenlake_client.engines.vllm.copies import Copy, DeviceCopy, HostCopy
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_testing.cpu_device import CpuDevice

BLOCKS = 6
CHUNK = 3
Groups = list[list[PageTable]]


DEVICE = CpuDevice()
Kind = Callable[[Groups, int], Copy]


def on_host(groups: Groups, blocks: int) -> HostCopy:
    return HostCopy(PageCache(groups, blocks))


def on_device(groups: Groups, blocks: int) -> DeviceCopy:
    there = [[PageTable(DEVICE.tensor(table.pages), table.nbytes) for table in group] for group in groups]
    return DeviceCopy(PageCache(there, blocks), DEVICE)


@pytest.fixture(params=[on_host, on_device])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def tables(seed: int) -> Groups:
    """Two groups over pages of 40 bytes, of which the groups use 40 and 24; the second group has one table less."""
    torch.manual_seed(seed)
    pages = [torch.randint(-128, 128, (BLOCKS, 40), dtype=torch.int8) for _ in range(3)]
    return [[PageTable(each, 40) for each in pages], [PageTable(each, 24) for each in pages[:2]]]


def expected(groups: Groups, part: Part) -> bytes:
    return b"".join(
        bytes(table.pages[block, : table.nbytes].numpy().view(np.uint8))
        for table in groups[part.group]
        for block in part.blocks
    )


@pytest.mark.parametrize("group", [0, 1])
def test_a_chunk_lies_table_by_table(kind: Kind, group: int) -> None:
    groups, part = tables(1), Part(0, group, 0, (4, 1, 5))
    shard = np.zeros(PageCache(groups, CHUNK).shard_bytes, np.uint8)
    nbytes = kind(groups, CHUNK).to_slot(shard, part)
    assert bytes(shard[:nbytes]) == expected(groups, part)
    assert not shard[nbytes:].any()


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("group", [0, 1])
def test_a_part_of_a_chunk_fills_its_blocks_alone(kind: Kind, group: int, skip: int) -> None:
    source, target, untouched = tables(1), tables(2), tables(2)
    shard = np.zeros(PageCache(source, CHUNK).shard_bytes, np.uint8)
    kind(source, CHUNK).to_slot(shard, Part(0, group, 0, (4, 1, 5)))
    shard.flags.writeable = False
    part = Part(0, group, skip, (2, 0, 3)[skip:])
    copy = kind(target, CHUNK)
    nbytes = copy.from_slot(shard, part)
    copy.finish()
    moved = expected(target, part)
    assert moved == expected(source, part._replace(blocks=(4, 1, 5)[skip:]))
    assert nbytes == len(moved)
    for mine, before in zip(target[group], untouched[group], strict=True):
        others = [block for block in range(BLOCKS) if block not in part.blocks]
        assert torch.equal(mine.pages[others], before.pages[others])
        assert torch.equal(mine.pages[:, mine.nbytes :], before.pages[:, mine.nbytes :])
