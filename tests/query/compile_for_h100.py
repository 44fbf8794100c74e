"""Compiles the kernel for an H100, without a GPU, and prints JSON: for each launch its shared memory and registers.

The test runs it as a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.query.test_launch import SHAPES
from tokenlake.attention import AttentionShape
from tokenlake_query.kernels.triton_cuda import TritonKernel, _attend_split
from tokenlake_query.kernels.triton_launch import launch_for

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


def compiled(name: str, queries: int) -> dict[str, Any]:
    """Figures of the kernel for `queries` queries of the shape `name`."""
    layout, heads = SHAPES[name]
    shape = AttentionShape.of(layout, heads)
    launch = launch_for(shape, 2, queries * shape.group)
    options = TritonKernel(layout, shape, "cpu")._constants(launch)
    constants = {key: options.pop(key) for key in list(options) if key.isupper()}
    names = _attend_split.arg_names[:8]
    types = ["*bf16", "*i64", "*fp32", "*fp32", *["i32"] * 4]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    # Pointers and the offsets of a layer are multiples of 16; a launch tells the compiler so too.
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 2, 3, 6, 7)}
    source = ASTSource(_attend_split, signature, constants, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = found.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [str(PTXAS), "-v", "-arch=sm_90a", str(file), "-o", str(file.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "shared": found.metadata.shared,
        "paper": launch.shared_bytes,
        "resident": launch.resident,
        "threads": 32 * launch.warps,
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", said)[0]),
        "async_widths": sorted(set(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", ptx))),
    }


if __name__ == "__main__":
    print(json.dumps({f"{name} {queries}": compiled(name, queries) for name in SHAPES for queries in (1, 16, 512)}))
