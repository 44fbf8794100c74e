"""The JSON of the page. `docs/page.md` has a table of these fields, made from their descriptions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


def _is(description: str) -> Meta:
    return Meta(description=description)


class PageStruct(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the JSON."""


NodeState = Literal["this node", "connected", "other ring", "draining", "refused", "unreachable"]


class PageNode(PageStruct, frozen=True):
    """A member of the cluster, as this node knows it."""

    name: str
    state: Annotated[
        NodeState, _is("`refused`, `unreachable` and `other ring` are states of the connection with this node")
    ]
    reason: Annotated[str, _is("why it is not connected; empty if it is")]
    for_s: Annotated[float, _is("seconds since the state of the connection began; of this node: since its start")]
    location: str
    memory_bytes: Annotated[int | None, _is("null where the setting `peers` gives no sizes")]
    used_share: Annotated[float | None, _is("share of its memory that holds segments; null while it is not connected")]
    sent_bytes_per_s: Annotated[
        float | None, _is("load: bytes per second that it sends to engines of other nodes, with a half-life of 2 s")
    ]


class PageTokensCount(PageStruct, frozen=True):
    """Tokens of the prompts of this node's engines since its start."""

    asked: Annotated[int, _is("tokens of the prompts")]
    supplied: Annotated[int, _is("those that the pool supplied")]
    engine_had: Annotated[int, _is("those that the engines' own caches had")]
    missed: Annotated[int, _is("those that the engines computed")]
    saved_prefill_s: Annotated[float, _is("seconds of prefill that the supplied tokens saved, by the engines' rates")]


class PageHistory(PageStruct, frozen=True):
    """Rates over time. All lists have one number for each interval, the oldest first."""

    end_s: Annotated[list[float], _is("end of the interval in seconds since 1970")]
    supplied: Annotated[list[float], _is("tokens per second, as in `tokens`")]
    engine_had: list[float]
    missed: list[float]
    sent: Annotated[list[float], _is("bytes of segments per second to other nodes, and from them")]
    received: list[float]


class PageTenant(PageStruct, frozen=True):
    """A tenant on this node."""

    name: str
    used_bytes: int
    quota_bytes: Annotated[int, _is("memory that it may have at most; without a quota all of the node's")]
    segments: int
    read_bytes_per_s: Annotated[float | None, _is("the last 10 s; null in the first two seconds after nobody looked")]
    written_bytes_per_s: float | None


class PageDisk(PageStruct, frozen=True):
    """A device of the disk tier of this node."""

    path: str
    state: Literal["serving", "set aside", "opening"]
    problem: str
    capacity_bytes: int
    used_bytes: int
    segments: int
    lost_segments: int


class PageLink(PageStruct, frozen=True):
    """Bytes of segments between this node and another one."""

    node: str
    sent_bytes: Annotated[int, _is("to the other node since the start of this one")]
    received_bytes: int
    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None


class PagePrefix(PageStruct, frozen=True):
    """Newest requests of this node whose prompts begin with the same segment."""

    key: Annotated[str, _is("key of that segment, in hexadecimal")]
    tenant: str
    requests: int
    asked_tokens: int
    supplied_tokens: int
    engine_had_tokens: int
    newest: Annotated[str, _is("name of the newest of the requests")]


class PageMiss(PageStruct, frozen=True):
    """Tokens that were missed for one reason."""

    reason: str
    tokens: int
    detail: str


class PageExplanation(PageStruct, frozen=True):
    """How the request used the pool, in tokens (`tokenlake explain`)."""

    ideal: int
    here: Annotated[int, _is("found on this node")]
    elsewhere: Annotated[dict[str, int], _is("found on other nodes and on disks, by place")]
    fetched: int
    supplied: int
    engine_had: int
    held: Annotated[int, _is("leased, and neither read nor released yet")]
    missed: list[PageMiss]


class PageCall(PageStruct, frozen=True):
    """One of the slowest calls of the newest requests of this node."""

    call: Literal["match", "fetch"]
    seconds: float
    age_s: Annotated[float, _is("seconds since the request's match ended")]
    tenant: str
    request: str
    explanation: Annotated[PageExplanation | None, _is("null where the node does not remember the request any more")]


class PageEvent(PageStruct, frozen=True):
    """A change that this node saw; looked for every 5 s."""

    at_s: Annotated[float, _is("seconds since 1970")]
    until_s: Annotated[float, _is("end of the interval of `segments`; else equal to `at_s`")]
    what: Literal["start", "ring", "peer", "membership", "engines", "disk", "segments"]
    severity: Literal["info", "warning"]
    text: str


class PageProblem(PageStruct, frozen=True):
    """A state that needs an operator."""

    what: str
    cure: Annotated[str, _is("the action of an operator; empty where it follows from the problem")]


class PageDocument(PageStruct, frozen=True):
    """The answer to `GET page.json`."""

    node: str
    cluster: str
    version: str
    made_s: Annotated[float, _is("time of the state in seconds since 1970, by the clock of the node")]
    uptime_s: float
    tenant: Annotated[str, _is("the only tenant that is shown; empty for all")]
    epoch: Annotated[int, _is("epoch of the ring record")]
    memory_bytes: int
    used_bytes: int
    spare_bytes: Annotated[int, _is("memory that no tenant has")]
    segments: int
    engines: int
    processes: int
    tokens: PageTokensCount
    history: PageHistory
    problems: Annotated[list[PageProblem], _is("at most 32")]
    nodes: Annotated[list[PageNode], _is("this node, then those that are not connected; at most 256")]
    nodes_left_out: int
    tenants: Annotated[list[PageTenant], _is("those nearest to their quotas; at most 100")]
    tenants_left_out: int
    disks: list[PageDisk]
    links: Annotated[list[PageLink], _is("those with most bytes; at most 65, `(others)` among them")]
    prefixes: Annotated[list[PagePrefix], _is("those with most requests; at most 12")]
    requests: Annotated[int, _is("newest requests that `prefixes` and `calls` are of; at most 1,024")]
    alone: Annotated[int, _is("those of them that begin with a segment that no other one has")]
    calls: Annotated[list[PageCall], _is("the slowest first; at most 8")]
    events: Annotated[list[PageEvent], _is("the newest first; at most 64")]
