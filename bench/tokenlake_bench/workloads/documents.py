"""Questions about long documents: each request is one of some documents with a question behind it.

With the defaults the documents are as long as a book part, and about fill the GPU memory of eight instances of a 70B
model; shorter ones with other popularity stand for question answering over retrieved documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Draw, Positive, TraceLine, TraceSettings, Turn, lay_out


class DocumentSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of questions about documents."""

    requests: Annotated[int, Meta(ge=1, le=10_000_000, description="Lines to write.")] = 2_000
    rate: Annotated[float, Meta(gt=0, le=1e6, description="Requests per second.")] = 2.0
    documents: Annotated[int, Meta(ge=1, le=1 << 20, description="Number of documents.")] = 37
    document_tokens: Annotated[int, Meta(ge=BLOCK_TOKENS, le=1 << 24, description="Tokens of a document.")] = 98_304
    skew: Annotated[float, Meta(ge=0, le=10, description="Zipf exponent of their popularity; 0: all alike.")] = 0.0
    question_mean: Annotated[Positive, Meta(description="Tokens of a question, mean (exponential).")] = 200.0
    output_mean: Annotated[Positive, Meta(description="Tokens of an answer, mean (exponential).")] = 150.0


def questions(settings: DocumentSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """Questions in time order, which come at `starts`."""
    texts = [draw.blocks(settings.document_tokens // BLOCK_TOKENS) for _ in range(settings.documents)]
    weights = list(accumulate(rank**-settings.skew for rank in range(1, settings.documents + 1)))

    def question() -> Iterator[Turn]:
        (text,) = draw.rng.choices(texts, cum_weights=weights)
        length = len(text) * BLOCK_TOKENS + 1 + round(draw.rng.expovariate(1 / settings.question_mean))
        output = 1 + round(draw.rng.expovariate(1 / settings.output_mean))
        yield Turn(0.0, length, output, draw.text(text).hash_ids(length))

    return lay_out(settings.requests, starts, question)
