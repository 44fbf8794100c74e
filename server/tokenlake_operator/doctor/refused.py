"""Engines that run beside a node and go without the pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.words import span
from tokenlake_proto.v1 import admin_pb2 as pb


def check_refused(name: str, refused: Iterable[pb.RefusedEngine]) -> Iterator[Finding]:
    """Yield a finding for each reason for which processes of engines go without the pool. `name`: of the node.
    `refused`: the processes, those that were refused last at the end. An engine that declines serves a model or a
    configuration that the pool cannot serve, which is no fault of either: a warning."""
    by_reason: dict[str, list[pb.RefusedEngine]] = {}
    for each in refused:
        by_reason.setdefault(each.reason, []).append(each)
    for reason, engines in by_reason.items():
        newest = engines[-1]
        process = f"process {newest.pid} of uid {newest.uid}"
        where = process if len(engines) == 1 else f"{len(engines)} processes, the last one {process}"
        yield Finding(
            "warning" if reason == "declined" else "error",
            f"engine-{reason}",
            f"{name}, {where}",
            f"without the pool for {span(newest.for_s)}: {newest.problem}",
            newest.cure,
        )
