"""The test setup of `bench planner`: two daemons with query engines, connected by links of given bandwidth and delay,
one model, and documents whose cache lies at a chosen node.

The engine is at node 1. Documents at node 0 are fetched to node 1, or queries are sent to them; documents at node 1 are
read in place. A fetched document stays at node 1 as a cached copy while there is room. So that every fetch of a
document really crosses the link, node 1 is nearly full, and each document is stored several times under different keys
(by a salt): the cached copy that was fetched longest ago is evicted before its key is used again.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tokenlake.attention import AttentionShape
from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.keys import Prefix, Salt, TokenIds
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench.demo_engine import TINY, FirstToken
from tokenlake_bench.load_meter import settle
from tokenlake_bench.planner.passes import Pass, PassClock
from tokenlake_bench.planner.shaping import Route, Shape, Shaping
from tokenlake_client import Pool
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
from tokenlake_client.engines.transformers.cache import RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.identity import cache_shape
from tokenlake_client.engines.transformers.segment_copy import LayerPair, SegmentCopier
from tokenlake_client.lease import Lease
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.ports import reserve_port
from tokenlake_testing.tiny_model import save_tiny_model

OWNER: Final = "node0"
READER: Final = "node1"
SEGMENT_TOKENS: Final = 256
CACHED_BYTES: Final = 16 << 20
"""Bytes that cached copies take at the engine's node: more than the longest document has, because else the fetch of its
end would evict its beginning."""
MEMORY: Final = 384 << 20
REGIONS: Final = 8
FILLING: Final = 8
"""Number of random segments that one `store_all` call writes while a node is filled."""
PATIENCE_S: Final = 10.0
RETRY_S: Final = 0.1
PATIENT_S: Final = 1.0
"""Seconds that a match may take, so long that a late reply on a busy machine does not count as a miss."""
LONGEST: Final = 4864
SEED: Final = 5


class PrefixUse(Enum):
    """A way to use a cached prefix: read it at this node, fetch it, ship queries to its node, or recompute it."""

    LOCAL = "local"
    FETCH = "fetch"
    SHIP = "ship"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of one batch of requests that share a cached prefix."""

    prefix: int
    """Number of tokens of the cached prefix, which all requests of the batch share."""
    new: int
    """Number of prompt tokens behind the prefix, of each request."""
    decode: int
    """Number of tokens that each request generates."""
    sharing: int
    """Number of requests in the batch."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times and bytes of one batch whose prefix was used in one way."""

    use: PrefixUse
    work: Work
    seconds: float
    """Seconds from the start to the last token."""
    ttft_s: float
    passes: tuple[Pass, ...]
    pool_s: float
    """Seconds spent in matching, fetching, copying and opening views; attention is not included."""
    moved_bytes: int
    """Bytes of segments, queries and outputs that moved between the nodes."""
    tokens: tuple[tuple[int, ...], ...]
    served: bool
    """True if the whole prefix was used in the intended way by all requests."""


class _SaltedPool:
    """The pool as the engine of this benchmark sees it. All keys contain a salt, which changes from request to request
    and so selects one of the stored copies of a document. Closing it does nothing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.salt = ""
        self.open_view = pool.open_view
        self.init_query = pool.init_query
        self.query = pool.query

    @property
    def layout(self) -> Layout:
        return self._pool.layout

    @property
    def node(self) -> str:
        return self._pool.node

    def match(self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH) -> Lease:
        # No engine of this benchmark stores segments, so a match must not wait for another engine to compute them.
        options = replace(options, in_flight_wait_s=0.0)
        return self._pool.match(keys, options, deadline_s=PATIENT_S)

    def prefix(self, tokens: TokenIds = (), *, adapter: str | None = None, salt: Salt = None) -> Prefix:
        return self._pool.prefix(tokens, adapter=adapter, salt=self.salt)

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, NDArray[np.uint8]], None],
        first: int = 0,
        patience: float = 0.0,
        *,
        request: str | None = None,
        hints: Hints | None = None,
    ) -> bytes:
        # Nothing is stored: segments of the measured prompts are not read again, and would take the slots of documents.
        return bytes([Code.EXISTS]) * len(keys)

    def mark_in_flight(self, keys: Sequence[SegmentKey], seconds: float) -> None:
        pass

    def hint(self, keys: Sequence[SegmentKey], hints: Hints) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Document:
    """A document, and by node the salts under which its prefix is stored there; the salt that was used longest ago
    comes first."""

    tokens: list[int]
    cache: list[LayerPair]
    there: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=lambda: ["here"])


class Rig:
    """The daemons, links, model and documents of the benchmark. A context manager: starts all processes, and ends them
    at the exit."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: lengths in tokens of the documents to store, multiples of `SEGMENT_TOKENS`."""
        if any(length % SEGMENT_TOKENS or not SEGMENT_TOKENS <= length <= LONGEST for length in lengths):
            raise ValueError(f"documents of {list(lengths)} tokens; expected multiples of 256 up to {LONGEST}")
        torch.set_num_threads(1)
        transformers_logging.disable_progress_bar()
        with tempfile.TemporaryDirectory(prefix="tokenlake-model-") as scratch:
            directory = save_tiny_model(scratch, TINY)
            self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            self.layout = layout_of(self.model, segment_tokens=SEGMENT_TOKENS)
        self.attention = AttentionShape.of(self.layout, TINY.heads)
        self._cache_shape = cache_shape(self.model)
        self._draw = random.Random(SEED)
        self._stack = ExitStack()
        self._documents = {length: self._document(length) for length in sorted(set(lengths))}

    def _document(self, length: int) -> _Document:
        tokens = self.draw(length)
        with TokenLakeEngine(self.model) as alone:
            return _Document(tokens, alone.prefill([*tokens, 0]).cache.row(0))

    def draw(self, count: int) -> list[int]:
        """`count` random token ids, other ones with each call."""
        return [self._draw.randrange(TINY.vocabulary) for _ in range(count)]

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        via = {(OWNER, READER): reserve_port(), (READER, OWNER): reserve_port()}
        self.cluster = Cluster(
            2,
            str(MEMORY),
            str(MEMORY // REGIONS),
            via,
            query_engine="true",
            suspect_ms=str(round(PATIENT_S * 5e3)),
            # Cached copies beyond `cached_share` take only free slots and displace no primary copy.
            cached_share=str(CACHED_BYTES / 2 / MEMORY),
        )
        self._stack.callback(self.cluster.close)
        routes = [Route(node, other, port, self.cluster.ports[other]) for (node, other), port in via.items()]
        self._shaping = Shaping(routes)
        self._stack.callback(self._shaping.close)
        owner, reader = self.cluster.nodes
        reader.start()
        self._reader = self._stack.enter_context(self.cluster.connect(1, self.layout))
        # The reader's node is full, so that a fetched copy takes the slot of an earlier one and documents stay remote.
        # It is filled before the owner's node starts, because a full node hands segments over to an empty one.
        for document in self._documents.values():
            self._store(self._reader, document, "here")
        self._fill(reader)
        owner.start()
        self.cluster.wait_ready()
        self._writer = self._stack.enter_context(self.cluster.connect(0, self.layout))
        for document in self._documents.values():
            # A document has so many stored copies that all but the first fill the room for cached copies: the copy that
            # was fetched is evicted before its key is used again.
            room = CACHED_BYTES + 2 * FILLING * self.layout.segment_bytes
            document.there += [f"there {number}" for number in range(2 + room // self._nbytes(document))]
            for salt in document.there:
                self._store(self._writer, document, salt)
        self._pool = _SaltedPool(self._reader)
        digest = self.layout.weights_digest
        modes: tuple[tuple[PrefixUse, Literal["fetch", "ship"]], ...] = (
            (PrefixUse.FETCH, "fetch"),
            (PrefixUse.SHIP, "ship"),
        )
        self._engines = {
            use: self._stack.enter_context(
                TokenLakeEngine(
                    self.model,
                    self._pool,
                    EngineOptions(mode=mode, segment_tokens=SEGMENT_TOKENS, weights_digest=digest),
                )
            )
            for use, mode in modes
        }
        self._engines[PrefixUse.LOCAL] = self._engines[PrefixUse.FETCH]

    def shape(self, shape: Shape) -> None:
        """Give all links this bandwidth and delay from now on."""
        self._shaping.shape(shape)

    def _store(self, pool: Pool, document: _Document, salt: str) -> None:
        cache = SegmentCopier().bind(self.layout, document.cache)

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            cache.write(slot, index * SEGMENT_TOKENS)

        codes = pool.store_all(self._keys(document, salt), fill, patience=PATIENCE_S)
        if set(codes) != {Code.COMMITTED}:
            raise TokenLakeError(f"a document was not stored: {[Code(code).name for code in codes]}")
        settle(self.cluster)

    def _fill(self, node: Node) -> None:
        """Store random segments at the node until it has free slots only for the cached copies of documents."""
        draw = np.random.default_rng(SEED)
        size = self.layout.segment_bytes
        noise = draw.standard_normal((FILLING, size // 4), np.float32).view(np.uint8)
        slots = MEMORY // REGIONS // size * REGIONS
        while slots - _held(node) > CACHED_BYTES // size + FILLING:
            keys = self._reader.prefix(self.draw(FILLING * SEGMENT_TOKENS)).keys
            self._reader.store_all(keys, list(noise), patience=PATIENCE_S)
            settle(self.cluster)

    def _nbytes(self, document: _Document) -> int:
        return len(document.tokens) // SEGMENT_TOKENS * self.layout.segment_bytes

    def _keys(self, document: _Document, salt: str) -> list[SegmentKey]:
        return self._reader.prefix(document.tokens, salt=salt).keys

    def _where(self, document: _Document, salt: str) -> bytes:
        with self._reader.match(self._keys(document, salt), deadline_s=PATIENT_S) as lease:
            return bytes(lease.codes)

    def keys(self, work: Work) -> tuple[SegmentKey, ...]:
        """Keys of the prefix of the batch `work` without a salt. The copies stored under salts differ from them in the
        salt alone."""
        return tuple(self._keys(self._documents[work.prefix], ""))

    def run(self, use: PrefixUse, work: Work, suffixes: Sequence[Sequence[int]]) -> Timed:
        """Serve one batch and use its prefix in the way `use`; the requests' prompts end with `suffixes`. Returns the
        times. Raises TokenLakeError where no stored copy lies at the required node."""
        document = self._documents[work.prefix]
        place = Code.LOCAL if use is PrefixUse.LOCAL else Code.REMOTE
        if use is not PrefixUse.RECOMPUTE:
            self._pool.salt = self._copy(document, place)
        ids = torch.tensor([[*document.tokens, *suffix] for suffix in suffixes])
        first = FirstToken()
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": work.decode,
            "min_new_tokens": work.decode,
            "do_sample": False,
            "streamer": first,
        }
        engine = self._engines.get(use)
        before = None if engine is None else engine.counts
        sent = self._sent()
        with PassClock(self.model) as clock:
            began = time.perf_counter()
            if engine is None:
                storage = allocate(self._cache_shape, len(ids), ids.shape[1] + work.decode)
                cache = RoomyCache([RoomyLayer(keys, values, 0) for keys, values in storage])
                output = self.model.generate(ids, past_key_values=cache, **arguments)
            else:
                output = engine.generate(ids, **arguments)
            seconds = time.perf_counter() - began
        pool_s, queries, served = 0.0, 0, True
        if engine is not None and before is not None:
            counts = engine.counts
            pool_s = counts.pool_seconds - before.pool_seconds
            queries = counts.bytes_sent + counts.bytes_received - before.bytes_sent - before.bytes_received
            name = "tokens_shipped" if use is PrefixUse.SHIP else "tokens_hit"
            served = getattr(counts, name) - getattr(before, name) == work.prefix * work.sharing
        return Timed(
            use=use,
            work=work,
            seconds=seconds,
            ttft_s=first.at - began,
            passes=tuple(clock.passes),
            pool_s=pool_s,
            moved_bytes=queries + self._sent() - sent,
            tokens=tuple(tuple(row) for row in output[:, ids.shape[1] :].tolist()),
            served=served,
        )

    def _copy(self, document: _Document, place: Code) -> str:
        salts = document.here if place is Code.LOCAL else document.there
        until = time.monotonic() + PATIENCE_S
        while True:
            found: Counter[str] = Counter()
            for index, salt in enumerate(salts):
                codes = self._where(document, salt)
                if set(codes) == {place}:
                    salts.append(salts.pop(index))
                    return salt
                found.update(Code(code).name for code in codes)
            if time.monotonic() > until:
                named = f"the document of {len(document.tokens)} tokens is {place.name}: {dict(found)}"
                raise TokenLakeError(f"no copy of {named}")
            time.sleep(RETRY_S)

    def _sent(self) -> int:
        return int(self.cluster.totals()["tokenlake_sent_bytes_total"])


def _held(node: Node) -> int:
    """Number of segments in the memory of a node."""
    return int(sum(value for name, value in node.metrics().items() if name.startswith("tokenlake_segments{")))
