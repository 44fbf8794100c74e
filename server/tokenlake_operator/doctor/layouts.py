"""Engines that serve one model with layouts that differ: they share no segments, and compute the same ones twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import AnyLayout, decode_layout
from tokenlake_operator.doctor.base import Finding
from tokenlake_operator.nodes import Node

_CURES = {
    "weights_digest": "load the same weights and configuration in all engines, and restart those that loaded others",
    "dtype": "set the same dtype of the cache in all engines (vLLM: --kv-cache-dtype and --dtype)",
    "segment_tokens": "set the same 'segment_tokens' in all engines (vLLM: in kv_connector_extra_config)",
    "engine": "run the same version of the engine everywhere",
    "cache": "set the same block size, attention backend and parallel sizes in all engines",
    "position": "set the same configuration of the position encoding (rope scaling, maximum length) in all engines",
    "quantisation": "set the same quantisation of the cache in all engines",
}
_OTHER = "use the same model configuration in all engines"


def check_layouts(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Of each tenant and model, the layouts of the engines that are connected now."""
    by_model: dict[tuple[str, str], dict[bytes, tuple[AnyLayout, list[str]]]] = {}
    for node in nodes:
        for engines in node.engines:
            try:
                layout = decode_layout(engines.layout.encoded)
            except LayoutRefused:
                continue  # of a newer version
            layouts = by_model.setdefault((engines.tenant, layout.model_id), {})
            layouts.setdefault(engines.layout.fingerprint, (layout, []))[1].append(node.name)
    for (tenant, model), layouts in by_model.items():
        for (one, places), (other, other_places) in pairwise(layouts.values()):
            yield _difference(f"model {model}, tenant {tenant}", one, places, other, other_places)


def _difference(
    where: str, one: AnyLayout, places: Sequence[str], other: AnyLayout, other_places: Sequence[str]
) -> Finding:
    if type(one) is not type(other):
        problem = "some engines store opaque segments, others segments whose layout the pool knows"
        return Finding(
            "warning", "layouts", where, problem, "use the same version and settings of the engine everywhere"
        )
    fields = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    listed = ", ".join(f"{name} {getattr(one, name)!s:.40} and {getattr(other, name)!s:.40}" for name in fields)
    problem = f"engines at {', '.join(sorted(places))} and at {', '.join(sorted(other_places))} share nothing: {listed}"
    cures = dict.fromkeys(_CURES.get(name, _OTHER) for name in fields)
    return Finding("warning", "layouts", where, problem, "; ".join(cures))
