"""The settings of the rules, which a daemon's configuration and a `CoreConfig` have in common."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.config.kinds import Form, Place, Seconds, Share
from tokenlake.config.setting import Setting
from tokenlake.config.values import format_size, parse_size
from tokenlake.location import NOWHERE


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds; shares are fractions of the node's slots."""

    location: Annotated[
        Place,
        Setting(
            "where this node is, as labels of domains whose nodes have faster links to each other than to others, the "
            "widest first: `row-2/rack-7/nvlink-1` ([locations](operations/locations.md))",
            why="all links are taken for equally fast",
            default="none",
        ),
    ] = NOWHERE
    lease_s: Annotated[
        Seconds,
        Setting(
            "time without a heartbeat after which an engine's session expires; engines send three in this time",
            why="two heartbeats may be lost, and the leases of a dead engine end soon",
        ),
    ] = 10.0
    reservation_s: Annotated[
        Seconds,
        Setting(
            "time between prepare and commit, after which a reservation expires",
            why="longer than the prefill of a long prompt",
        ),
    ] = 30.0
    dirty_share: Annotated[
        Share,
        Setting(
            "limit of slots that are being written; above it a store is refused",
            why="half of the memory stays for segments that are read; one engine may store two fifths of it",
        ),
    ] = 0.45
    pinned_share: Annotated[
        Share,
        Setting(
            "limit of the slots of a tenant that pins keep; above it a pin is refused",
            why="what nobody uses leaves three quarters of the memory to the segments that requests use",
        ),
    ] = 0.25
    session_lease_share: Annotated[
        Share,
        Setting(
            "limit of slots that matches lease to one session; the session's fetches may lease half of the other slots "
            "in addition",
            why="other sessions can always lease some slots",
        ),
    ] = 0.95
    session_reserve_share: Annotated[
        Share,
        Setting(
            "limit of slots that one session has reserved",
            why="less than `dirty_share`, so that one engine does not keep the others from storing",
        ),
    ] = 0.40
    disk_writes_per_day: Annotated[
        float,
        Meta(ge=0, le=1000, description="writes of the whole size per day"),
        Setting(
            "budget of writes to each device of `disk`, in multiples of its size there per day; 0: no limit",
            why="drives for reading are rated for 1 write of their capacity per day, for mixed use 3",
        ),
    ] = 3.0
    cold_bytes_per_day: Annotated[
        int,
        Meta(ge=0, le=1 << 50, description="a size such as 500GiB, 1TiB or a number of bytes,"),
        Form(parse_size, format_size),
        Setting(
            "budget of bytes that this node writes to `cold` per day; 0: no limit",
            why="a file server and S3 do not wear",
        ),
    ] = 0
    max_sessions: Annotated[
        int,
        Meta(ge=1, le=65536),
        Setting(
            "limit of engines that are connected at a time; each of several tenants may have an equal part",
            why="8 engines of 8 ranks, with room for restarts; the limit bounds file descriptors and maps",
        ),
    ] = 256
