"""Messages of attention in place: engine to its query engine, and query engine to query engine.

A connection has one client and one server: an engine is a client of the query engine of its node, and a query engine is
a client of the query engines of other nodes. Messages are frames (`tokenlake.wire.frames`); between nodes the raw bytes
that a frame announces follow it. An engine's queries and results lie in memory that it shares with the query engine of
its node, so that frames carry only their offsets.

A view is a sequence of whole segments. Every query of the view attends to all their tokens, without a mask; the engine
computes causal attention over its own new tokens itself. A step is one forward pass of an engine, with a query per
layer. A part is the queries of one view in one step.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenlake.wire.fields import Index, Name, Seconds

ALIGNMENT = 64
"""Alignment in bytes: arrays in the shared memory of `OpenBuffer` begin at multiples of it."""

Dtype = Literal["float32", "bfloat16", "float16"]
Heads = Annotated[int, Meta(ge=1, le=1 << 16)]
Scale = Annotated[float, Meta(gt=0, le=1e6)]
MAX_FRAME = 4 << 20
"""Maximum bytes of a frame. A request to open a view has 32 bytes per segment key, so a view has fewer than 131,072
segments."""
MAX_STEP_BYTES = 256 << 20
"""Maximum bytes of the queries of one step, and of its float32 outputs: the results of one step are copied at once,
during which no other tenant is served."""
MAX_PARTS = 4096
Parts = Annotated[tuple[tuple[int, Index], ...], Meta(max_length=MAX_PARTS)]
"""The queries of each view in a step or request (its parts): (view, number of query tokens) each."""
Nodes = Annotated[tuple[Name, ...], Meta(max_length=255)]
"""Names of nodes; an index of one byte refers to each."""
Offset = Annotated[int, Meta(ge=0, lt=1 << 48)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class OpenBuffer(_Message, frozen=True, tag=1):
    """From an engine to the query engine: share memory for queries and results, as the buffer of the number `buffer`.
    The memory's descriptor (a memfd sealed against shrinking) travels beside the frame. `nbytes` 0: unmap the buffer.
    Not answered."""

    buffer: int
    nbytes: Offset


class OpenView(_Message, frozen=True, tag=2):
    """Open a view of these segments, for queries of `heads` heads. The client chooses the number `view`. Answered with
    `Viewed`.

    `nodes` and `owners` say where each segment is leased, as `engine.Located` does; between nodes both are empty,
    because the server opens only segments of its own node. `tenant` and `layout` are empty from an engine, whose
    connection has both."""

    view: int
    tenant: Name
    layout: bytes
    keys: bytes
    nodes: Nodes
    owners: bytes
    heads: Heads
    scale: Scale


class Viewed(_Message, frozen=True, tag=3):
    """Answers `OpenView`: LOCAL, REMOTE (open at another query engine) or MISSING per key. Queries of the view will
    attend to the first `hits` keys; between nodes all of these are LOCAL."""

    view: int
    hits: Index
    codes: bytes


class CloseView(_Message, frozen=True, tag=4):
    """The client will send no more queries of these views. Not answered."""

    views: Annotated[tuple[int, ...], Meta(max_length=MAX_PARTS)]


class Step(_Message, frozen=True, tag=5):
    """From an engine: set the parts that each further `Query` of this buffer computes, and the places of their arrays.
    Not answered.

    At `queries` in the buffer: [tokens of all parts, heads, key dim] of `dtype`, written by the engine before each
    `Query`. At `outputs`: float32 [tokens, heads, value dim], at `sums` float32 [tokens, heads] (natural logarithm
    of the sum of exponentials), written before each `Answered`. Offsets are multiples of `ALIGNMENT`."""

    buffer: int
    step: int
    dtype: Dtype
    parts: Parts
    queries: Offset
    outputs: Offset
    sums: Offset


class Query(_Message, frozen=True, tag=6):
    """From an engine: attend over `layer` now. Answered with `Answered` within `deadline_s`. A higher `attempt` for the
    same step and layer makes answers to the lower ones void."""

    buffer: int
    step: int
    layer: Index
    attempt: Index
    deadline_s: Seconds


class Answered(_Message, frozen=True, tag=7):
    """Answers `Query`: one code per part, LOCAL (whole result in the buffer) or LOST."""

    buffer: int
    step: int
    layer: Index
    attempt: Index
    codes: bytes
    sent_bytes: int
    """Bytes of queries that were sent to other nodes, their frames included."""
    received_bytes: int
    """Bytes of outputs and sums that were received from other nodes, their frames included."""


class Ask(_Message, frozen=True, tag=8):
    """Between nodes, one per query of an engine and peer: compute attention over `layer`. After the frame follow the
    queries of all `parts`, [tokens, heads, key dim] of `dtype` each. The answer repeats `number`."""

    number: int
    layer: Index
    dtype: Dtype
    parts: Parts
    nbytes: Offset


class Result(_Message, frozen=True, tag=9):
    """Answers `Ask`: LOCAL or LOST per part. After the frame follow, of the LOCAL parts in order, the outputs
    [tokens, heads, value dim] of the `dtype` of the `Ask` each, then the sums, float32 [tokens, heads] each."""

    number: int
    layer: Index
    codes: bytes
    nbytes: Offset


class Refused(_Message, frozen=True, tag=10):
    """Answers a request that broke a rule, or that this side cannot serve; `kind` is a class name of
    `tokenlake.errors`. `view` is 0 unless an `OpenView` is refused. The connection goes on after a refused view or
    step, and closes after a frame that cannot be read."""

    view: int
    kind: str
    reason: str


QueryRequest = OpenBuffer | OpenView | CloseView | Step | Query
QueryReply = Viewed | Answered | Refused
AskRequest = OpenView | CloseView | Ask
AskReply = Viewed | Result | Refused

query_decoder: msgspec.msgpack.Decoder[QueryRequest] = msgspec.msgpack.Decoder(QueryRequest)
query_reply_decoder: msgspec.msgpack.Decoder[QueryReply] = msgspec.msgpack.Decoder(QueryReply)
ask_decoder: msgspec.msgpack.Decoder[AskRequest] = msgspec.msgpack.Decoder(AskRequest)
ask_reply_decoder: msgspec.msgpack.Decoder[AskReply] = msgspec.msgpack.Decoder(AskReply)
