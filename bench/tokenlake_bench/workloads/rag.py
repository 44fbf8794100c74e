"""Questions behind retrieved documents: skewed popularity, prompts that share a prefix only where the order agrees.

Published by RAGCache (Jin et al., arXiv 2404.12457): 60 % of the requests go to the top 3 % of the documents; Wikipedia
pages of some 3,700 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Annotated, Final

from msgspec import Meta

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import Count, Draw, Positive, Sigma, TraceLine, TraceSettings, Turn, lay_out

_DRAWS: Final = 20
"""Maximum number of draws for each retrieved document. A document that the request has already is drawn again."""


class RagSettings(TraceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the workload of questions. A prompt is the system prompt, the documents in the order in which they
    were retrieved, and the question."""

    system_blocks: Annotated[int, Meta(ge=0, le=4096, description="Blocks that all prompts begin with.")] = 1
    documents: Annotated[Count, Meta(description="Number of documents.")] = 10_000
    zipf: Annotated[float, Meta(ge=0, le=10, description="The n-th document has weight 1 / n^this.")] = 0.96
    retrieved: Annotated[int, Meta(ge=1, le=64, description="Different documents per request.")] = 2
    document_median: Annotated[Positive, Meta(description="Tokens of a document, median.")] = 2_700.0
    document_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.8
    question_median: Annotated[Positive, Meta(description="Tokens of a question, median.")] = 60.0
    question_sigma: Annotated[Sigma, Meta(description="Sigma of that distribution.")] = 0.6
    output_mean: Annotated[Positive, Meta(description="Tokens of an answer, mean (exponential).")] = 100.0
    longest: Annotated[Count, Meta(description="Longest document or question, in tokens.")] = 65_536

    def __post_init__(self) -> None:
        if self.retrieved > self.documents:
            raise ValueError(f"retrieved: at most {self.documents}, the number of documents")

    @property
    def turns_mean(self) -> float:
        """The number of requests of a session: 1, because a session is a single question."""
        return 1.0


def questions(settings: RagSettings, draw: Draw, starts: Iterator[float]) -> list[TraceLine]:
    """One request per question, in time order. `starts` gives the times of the questions."""
    system = draw.blocks(settings.system_blocks)
    lengths = [
        draw.length(settings.document_median, settings.document_sigma, settings.longest)
        for _ in range(settings.documents)
    ]
    weights = list(accumulate(rank**-settings.zipf for rank in range(1, settings.documents + 1)))
    ranks = range(settings.documents)
    known: dict[tuple[int, ...], list[int]] = {(): system}

    def blocks(path: tuple[int, ...], end: int) -> list[int]:
        """Block ids of the full blocks up to the end of the last document of `path`, the sequence of retrieved
        documents."""
        found = known.get(path)
        if found is None:
            before = blocks(path[:-1], end - lengths[path[-1]])
            found = known[path] = before + draw.blocks(end // BLOCK_TOKENS - len(before))
        return found

    def retrieve() -> list[int]:
        path: list[int] = []
        for document in draw.rng.choices(ranks, cum_weights=weights, k=settings.retrieved * _DRAWS):
            if document not in path:
                path.append(document)
            if len(path) == settings.retrieved:
                return path
        # If too few different documents were drawn, the most popular of the others are added.
        rest = islice((document for document in ranks if document not in path), settings.retrieved - len(path))
        return path + list(rest)

    def question() -> Iterator[Turn]:
        path = retrieve()
        end = settings.system_blocks * BLOCK_TOKENS + sum(lengths[document] for document in path)
        length = end + draw.length(settings.question_median, settings.question_sigma, settings.longest)
        output = 1 + round(draw.rng.expovariate(1 / settings.output_mean))
        yield Turn(0.0, length, output, draw.text(blocks(tuple(path), end)).hash_ids(length))

    return lay_out(settings.requests, starts, question)
