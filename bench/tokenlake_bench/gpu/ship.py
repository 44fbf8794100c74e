"""A layer's step whose queries go to a second process's segments on the same device, against fetching these segments.

::

    this process    | queries -> memory of both |  go -> | own part    |        | merge |
    other process                                        | attention -> memory | <- done

Both processes map the memory with the queries and results (CUDA IPC), and this process maps the segments for fetching.
The signals go through pipes. Times are those of the host, from the first operation until the device is done.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tokenlake.attention import AttentionShape
from tokenlake.attention.torch_merge import RunningMerge
from tokenlake.layout import DTYPE_BYTES, Layout
from tokenlake.planner.fits import QueryFit, TransferFit
from tokenlake_bench.gpu.base import CPU, Rig, Row, device_named
from tokenlake_bench.gpu.kernel import MODELS, TOLERANCE, Cache, cache_bytes, layout_of, needs_kernel, reference
from tokenlake_query.kernels import kernel_for

MODEL = "GQA"
OWN_TOKENS = 1024
COLD_BYTES = 160 << 20
"""The steps go round layers of at least as many bytes, more than the L2 cache has."""
WARM, TURNS = 3, 10


def ship(rig: Rig) -> Iterator[Row]:
    """A row for each number of cached tokens and of queries: microseconds of a step with shipped queries, of one with
    fetched segments, and of the copy alone. The last row has the fits as inputs of the planner (`docs/planner.md`)."""
    device_named(rig.device)
    if rig.device != CPU:
        needs_kernel(rig)
    queried, fetched = QueryFit(), TransferFit(0.0, 0.0)
    for tokens in (512,) if rig.small else (32768, 4096):
        yield from _rows(rig, tokens, (1, 4) if rig.small else (1, 16, 512), queried, fetched)
    start_s, byte_s, token_s, pair_s = queried.coefficients
    fetch_start_s, fetch_byte_s = fetched.coefficients
    yield Row(
        "inputs of the planner",
        queried.known and fetched.known,
        {
            "queries_a_s": start_s,
            "queries_b_s_per_byte": byte_s,
            "queries_c_s_per_cached": token_s,
            "queries_d_s_per_query_and_cached": pair_s,
            "fetch_a_s": fetch_start_s,
            "fetch_b_s_per_byte": fetch_byte_s,
        },
    )


@dataclass(frozen=True)
class _Scene:
    """The attention of both processes, which both compute from the same arguments."""

    name: str
    tokens: int
    most: int
    """The greatest number of queries of a step."""

    @property
    def layout(self) -> Layout:
        """With so many layers that they do not fit into the L2 cache."""
        if self.name == CPU:
            return layout_of(MODEL, 2, "float32")
        return layout_of(MODEL, max(2, -(-COLD_BYTES // cache_bytes(layout_of(MODEL, 1), self.tokens))))

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape.of(self.layout, MODELS[MODEL][1])

    @property
    def dtype(self) -> Any:
        return getattr(torch, self.layout.dtype)

    def nbytes(self, tokens: int) -> int:
        """The bytes of the segments of `tokens` tokens."""
        return tokens // self.layout.segment_tokens * self.layout.segment_bytes

    @property
    def message_bytes(self) -> int:
        return self.most * self.shape.query_bytes(DTYPE_BYTES[self.layout.dtype], 4)

    def message(self, memory: Any, queries: int) -> tuple[Any, Any, Any]:
        """The queries, `out` and `lse` in the memory of both processes."""
        heads, bounds = queries * self.shape.q_heads, [0]
        for nbytes in (self.shape.key_dim * DTYPE_BYTES[self.layout.dtype], self.shape.value_dim * 4, 4):
            bounds.append(bounds[-1] + heads * nbytes)
        asked, out, lse = (memory[first:stop] for first, stop in pairwise(bounds))
        shape = queries, self.shape.q_heads, -1
        return (
            asked.view(self.dtype).view(shape),
            out.view(torch.float32).view(shape),
            lse.view(torch.float32).view(shape[:2]),
        )

    def slots(self, memory: Any) -> list[Any]:
        """The segments in `memory`."""
        return list(memory.split(self.layout.segment_bytes))

    def attention(self, slots: list[Any]) -> Callable[[Any, int], tuple[Any, Any]]:
        """Attention of queries over a layer of `slots`, for operations of a stream."""
        kernel: Any = kernel_for(self.layout, self.shape, self.name)
        if self.name == CPU:
            arrays = [slot.numpy() for slot in slots]

            def attend(queries: Any, layer: int) -> tuple[Any, Any]:
                found = kernel.attend(queries.numpy(), arrays, layer)
                return torch.from_numpy(found.out), torch.from_numpy(found.lse)

            return attend
        pages: list[Any] = []

        def attend_there(queries: Any, layer: int) -> tuple[Any, Any]:
            if not pages:
                pages.append(kernel.page_table(slots))
            out, lse = kernel.attend_there(queries, pages[0], layer)
            return out, lse

        return attend_there


def _plain(memory: Any) -> Any:
    """The memory for operations of a stream, which mix it with temporary tensors."""
    return memory.tensor.as_subclass(torch.Tensor)


def _fill(scene: _Scene, memory: Any, seed: int) -> None:
    generator = torch.Generator(memory.device).manual_seed(seed)
    memory.view(scene.dtype).normal_(generator=generator)


def _rows(rig: Rig, tokens: int, counts: tuple[int, ...], queried: QueryFit, fetched: TransferFit) -> Iterator[Row]:
    scene, device = _Scene(rig.device, tokens, max(counts)), device_named(rig.device)
    message = device.allocate(scene.message_bytes)
    command = [sys.executable, "-m", "tokenlake_bench.gpu.ship"]
    command += [rig.device, str(tokens), str(scene.most), message.handle().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            here = _Here(scene, device, _plain(message), child)
            for count in counts:
                yield here.row(count, queried, fetched)
            here.close()
        finally:
            child.communicate()
            message.close()


class _Here:
    """The process with the queries."""

    def __init__(self, scene: _Scene, device: Any, message: Any, child: subprocess.Popen[str]) -> None:
        self._scene, self._message, self._child = scene, message, child
        self._stream = device.stream()
        own, nbytes = scene.nbytes(OWN_TOKENS), scene.nbytes(scene.tokens)
        # Of the segments that are here, the last ones are room for fetched segments.
        self._all: Any = _empty(self._stream, own + nbytes)
        self._stream.run(lambda: _fill(scene, self._all[:own], 1))
        self._stream.synchronize()
        slots = scene.slots(self._all)
        self._count = own // scene.layout.segment_bytes
        self._cache = Cache(scene.layout, slots)
        self._over_own, self._over_all = scene.attention(slots[: self._count]), scene.attention(slots)
        self._there = device.open(bytes.fromhex(self._line()), nbytes)
        shape = nbytes // scene.layout.segment_bytes, scene.layout.shards, scene.layout.layers, -1
        # A copy of strided bytes would move one byte per thread.
        self._source, self._target = (
            each.view(torch.int64).view(shape) for each in (_plain(self._there), self._all[own:])
        )

    def close(self) -> None:
        """Unmap the other process's segments."""
        self._source = None
        self._there.close()

    def row(self, count: int, queried: QueryFit, fetched: TransferFit) -> Row:
        """The row for `count` queries; its times are added to the fits."""
        scene, layer = self._scene, self._scene.layout.layers - 1
        query = torch.empty(count, scene.shape.q_heads, scene.shape.key_dim, dtype=scene.dtype, device=self._all.device)
        self._stream.run(lambda: query.normal_(generator=torch.Generator(query.device).manual_seed(count)))
        shipped = self._shipped(query, layer)
        self._copy(layer)
        compared: list[float] = []

        def compare() -> None:
            expected, _ = reference(query, *self._cache.flat(layer), scene.shape)
            here, _ = self._over_all(query, layer)
            compared.extend(((each - expected).abs().max() / expected.abs().max()).item() for each in (shipped, here))

        self._stream.run(compare)
        self._stream.synchronize()
        own_s = statistics.median(self._times(lambda layer: self._run(self._over_own, query, layer)))
        ship_s = self._times(lambda layer: self._shipped(query, layer))
        copy_s = self._times(self._copied)
        fetch_s = self._times(lambda layer: self._fetched(query, layer))
        nbytes = count * scene.shape.query_bytes(DTYPE_BYTES[scene.layout.dtype], 4)
        now = time.perf_counter()
        for each in ship_s:
            queried.add(count, nbytes, scene.tokens, each - own_s, now)
        for each in copy_s:
            fetched.add(cache_bytes(scene.layout, scene.tokens), each, now)
        times = {"ship_us": ship_s, "fetch_us": fetch_s, "copy_us": copy_s}
        return Row(
            f"{scene.tokens} tokens, {count} queries",
            max(compared) <= TOLERANCE,
            {name: statistics.median(each) * 1e6 for name, each in times.items()}
            | {"own_us": own_s * 1e6, "worst_difference": max(compared)},
        )

    def _times(self, step: Callable[[int], object]) -> list[float]:
        """Seconds of steps over one layer after the other."""
        taken: list[float] = []
        for turn in range(WARM + TURNS):
            began = time.perf_counter()
            step(turn % self._scene.layout.layers)
            taken.append(time.perf_counter() - began)
        return taken[WARM:]

    def _shipped(self, query: Any, layer: int) -> Any:
        asked, there, of_there = self._scene.message(self._message, len(query))
        self._stream.run(lambda: asked.copy_(query))
        self._stream.synchronize()
        self._write(f"{layer} {len(query)}\n")
        merged: list[RunningMerge] = []
        self._stream.run(lambda: merged.append(RunningMerge(*self._over_own(query, layer))))
        self._line()
        self._stream.run(lambda: merged[0].add(there, of_there))
        self._stream.synchronize()
        return merged[0].out

    def _copy(self, layer: int) -> None:
        self._stream.run(lambda: self._target[:, :, layer].copy_(self._source[:, :, layer]))

    def _copied(self, layer: int) -> None:
        self._copy(layer)
        self._stream.synchronize()

    def _fetched(self, query: Any, layer: int) -> None:
        self._copy(layer)
        self._run(self._over_all, query, layer)

    def _run(self, attend: Callable[[Any, int], object], query: Any, layer: int) -> None:
        self._stream.run(lambda: attend(query, layer) and None)
        self._stream.synchronize()

    def _write(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line)
        self._child.stdin.flush()

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the process with the segments has ended")
        return line.strip()


def _empty(stream: Any, nbytes: int) -> Any:
    return stream.empty((nbytes,), torch.uint8).as_subclass(torch.Tensor)


def _serve(name: str, tokens: str, most: str, handle: str) -> None:
    """The process with the segments: prints their handle, then a line for each layer that was attended to."""
    scene, device = _Scene(name, int(tokens), int(most)), device_named(name)
    message = device.open(bytes.fromhex(handle), scene.message_bytes)
    segments, stream = device.allocate(scene.nbytes(scene.tokens)), device.stream()
    stream.run(lambda: _fill(scene, _plain(segments), 2))
    stream.synchronize()
    attend = scene.attention(scene.slots(_plain(segments)))
    print(segments.handle().hex(), flush=True)

    def answer(layer: int, queries: int) -> None:
        asked, out, lse = scene.message(_plain(message), queries)
        found, of_found = attend(asked, layer)
        out.copy_(found)
        lse.copy_(of_found)

    for line in sys.stdin:
        layer, queries = map(int, line.split())
        stream.run(lambda layer=layer, queries=queries: answer(layer, queries))  # type: ignore[misc]
        stream.synchronize()
        print("done", flush=True)
    message.close()
    segments.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
