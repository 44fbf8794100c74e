"""The sizes of the launches of the kernel for GPUs, as its documentation states them for an H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tokenlake.attention import AttentionShape
from tokenlake.layout import Layout
from tokenlake_query.kernels.triton_launch import SHARED_BYTES, launch_for, splits_for

PROCESSORS, REGISTERS = 132, 65536
IN_FLIGHT = 3.35e12 * 600e-9 / PROCESSORS
"""Bytes that each multiprocessor has to have under way for the whole bandwidth."""


def layout_of(**fields: object) -> Layout:
    return Layout(model_id="m", weights_digest="00", dtype="bfloat16", layers=2, position="none", **fields)  # type: ignore[arg-type]


SHAPES = {
    "GQA": (layout_of(kv_heads=8, key_dim=128, value_dim=128), 32),
    "MLA": (layout_of(kv_heads=1, key_dim=576, value_dim=512, attention="latent"), 128),
}
EXPECTED = {
    ("GQA", 1): (16, [256, 256, 264], [32, 32, 33], 104448),
    ("GQA", 16): (64, [256, 256, 264], [32, 32, 33], 81920),
    ("GQA", 512): (128, [128] * 3, [1] * 3, 131072),
    ("MLA", 1): (64, [64, 128, 128], [32, 64, 64], 221184),
    ("MLA", 16): (64, [128] * 3, [4] * 3, 221184),
    ("MLA", 512): (64, [1024] * 3, [1] * 3, 221184),
}


@pytest.mark.parametrize(("name", "queries"), EXPECTED)
def test_the_launches_for_an_h100(name: str, queries: int) -> None:
    layout, heads = SHAPES[name]
    shape = AttentionShape.of(layout, heads)
    launch = launch_for(shape, 2, queries * shape.group)
    groups = -(-queries * shape.group // launch.rows) * shape.kv_heads
    blocks = [tokens // launch.tokens for tokens in (4096, 32768, 131072)]
    splits = [splits_for(each, groups, launch, PROCESSORS) for each in blocks]
    assert (launch.rows, [groups * each for each in splits], splits, launch.shared_bytes) == EXPECTED[name, queries]
    assert launch.resident * launch.shared_bytes <= SHARED_BYTES
    loaded = launch.stages - (1 if launch.rows >= 64 else 2)
    assert launch.resident * loaded * launch.block_bytes >= 2 * IN_FLIGHT


def test_there_is_at_least_a_block_per_split() -> None:
    launch = launch_for(AttentionShape.of(*SHAPES["GQA"]), 2, 4)
    assert [splits_for(blocks, 8, launch, PROCESSORS) for blocks in (1, 4, 33)] == [1, 4, 33]
    assert splits_for(8, 1000, launch, PROCESSORS) == 1


@pytest.mark.rest
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_compiled_kernels_fit_an_h100() -> None:
    """Loads are asynchronous and of 16 bytes; shared memory and registers have room for the resident programs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.query.compile_for_h100"]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert not child.returncode, child.stderr
    for name, found in json.loads(child.stdout).items():
        assert found["async_widths"] == ["0x10"], name
        assert found["spilled"] == 0, name
        assert found["shared"] <= found["paper"], name
        assert found["resident"] * found["threads"] * found["registers"] <= REGISTERS, name
