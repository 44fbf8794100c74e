"""The timeline of torch's profiler in numbers: the share of copies over the bus that lies under other work."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Span = tuple[float, float]
"""Begin and end, in microseconds."""


class Timeline(NamedTuple):
    """The operations of a device, as spans."""

    copies: list[Span]
    """Copies over the bus."""
    engine: list[Span]
    """Kernels of the stream that ran kernels for the longest time."""
    others: list[Span]
    """Kernels of the other streams."""


def record(work: Callable[[], object]) -> Timeline:
    """Run `work`, and return the operations of the GPU meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "trace.json")
        profile.export_chrome_trace(str(file))
        return read(json.loads(file.read_bytes())["traceEvents"])


def read(events: Iterable[dict[str, Any]]) -> Timeline:
    """The timeline of a trace in Chrome's format."""
    copies: list[Span] = []
    kernels: dict[Any, list[Span]] = {}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind not in ("kernel", "gpu_memcpy"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        if kind == "kernel":
            kernels.setdefault(event.get("args", {}).get("stream"), []).append(span)
        elif "HtoD" in name or "DtoH" in name:
            copies.append(span)
    busy = Counter({stream: sum(end - begin for begin, end in spans) for stream, spans in kernels.items()})
    engine = busy.most_common(1)[0][0] if busy else None
    others = [span for stream, spans in kernels.items() if stream != engine for span in spans]
    return Timeline(copies, kernels.get(engine, []), others)


def covered(spans: Iterable[Span], by: Iterable[Span]) -> float:
    """The share of the time of `spans` during which at least one span of `by` is under way; 0 without spans."""
    merged: list[list[float]] = []
    for begin, end in sorted(by):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    whole = under = 0.0
    first = 0
    for begin, end in sorted(spans):
        whole += end - begin
        while first < len(merged) and merged[first][1] <= begin:
            first += 1
        at = first
        while at < len(merged) and merged[at][0] < end:
            under += max(0.0, min(end, merged[at][1]) - max(begin, merged[at][0]))
            at += 1
    return under / whole if whole else 0.0
