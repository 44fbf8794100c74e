"""What the messages of several services have in common: keys, names, layouts, the activity of the node."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.report.explain import RecentRequest
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.opaque_layout import AnyLayout, OpaqueLayout
from tokenlake.wire.slots import split_keys
from tokenlake_proto.v1 import admin_pb2, scheduling_pb2

MAX_KEYS = 16_384
"""Limit of the segments of all prompts of one message."""
MAX_NAME = 256
"""Limit of the characters of a name of a request, fleet, instance or node."""


def keys_of(packed: bytes) -> list[SegmentKey]:
    """Packed keys. Raises ValueError."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"keys take {len(packed)} bytes, which is no multiple of {KEY_BYTES}")
    return split_keys(packed)


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that is longer than the daemon keeps."""
    if len(name) > MAX_NAME:
        raise ValueError(
            f"the name of a {what} has {len(name)} characters; expected at most {MAX_NAME}: use a shorter name"
        )


def layout_message(layout: AnyLayout) -> scheduling_pb2.Layout:
    """A layout as a message."""
    return scheduling_pb2.Layout(
        fingerprint=bytes(layout.fingerprint()),
        model_id=layout.model_id,
        segment_tokens=layout.segment_tokens,
        segment_bytes=layout.segment_bytes,
        encoded=layout.encode(),
        opaque=isinstance(layout, OpaqueLayout),
    )


def activity_message(recent: Sequence[RecentRequest], count: int) -> admin_pb2.GetActivityResponse:
    """The `count` prefixes that most of the requests begin with, and the `count` slowest calls. `recent`: the oldest
    first."""
    prefixes: dict[tuple[str, bytes], admin_pb2.HotPrefix] = {}
    calls: list[tuple[float, str, RecentRequest]] = []
    for each in recent:
        if each.first:
            made = admin_pb2.HotPrefix(tenant=each.tenant, key=each.first)
            prefix = prefixes.setdefault((each.tenant, each.first), made)
            prefix.requests += 1
            prefix.asked_tokens += each.asked
            prefix.supplied_tokens += each.supplied
            prefix.engine_had_tokens += each.engine_had
            prefix.newest = each.name
        calls += [(each.match_s, "match", each), (each.fetch_s, "fetch", each)]
    hot = sorted(prefixes.values(), key=lambda prefix: (-prefix.requests, -prefix.supplied_tokens, prefix.key))
    calls.sort(key=lambda call: -call[0])
    slow = [
        admin_pb2.SlowCall(tenant=each.tenant, request=each.name, call=call, seconds=seconds, age_s=each.age_s)
        for seconds, call, each in calls[:count]
        if seconds > 0
    ]
    single = sum(prefix.requests == 1 for prefix in hot)
    return admin_pb2.GetActivityResponse(requests=len(recent), prefixes=hot[:count], calls=slow, alone=single)
