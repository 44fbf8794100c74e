"""Segments of a check that cross between nodes, and whether their bytes arrive.

Only a program beside a daemon stores and reads bytes, by the socket of engines. The other nodes are told what to do by
their control planes: `Prefetch` lets a node bring a segment from a node that is named, `Evict` drops it. So the bytes
of every pair make a round through the node of the command (`here`), and no other copy can stand in for a lost one::

    here -> there:       stored here, brought to there; evicted here; brought back from there and compared
    there -> here:       is the second half of that
    one -> other:        stored here, brought to one, evicted here, brought from one to other; evicted at one;
                         brought back from other and compared

The segments have keys of their own and a time to live, and are evicted everywhere behind each pair.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code
from tokenlake.wire.slots import join_keys
from tokenlake_client import MatchOptions, Pool
from tokenlake_operator.doctor.running import cure_of
from tokenlake_operator.nodes import Node
from tokenlake_operator.reaching import one_line
from tokenlake_proto.v1 import admin_pb2, scheduling_pb2

SEGMENTS: Final = 2
"""Segments of a pair: so many are brought to a node whose memory is full."""
TTL_S: Final = 60.0
"""Seconds from which on segments are evicted first where their node could not be told to evict them."""
LEFT_TTL_S: Final = 600.0
"""The same of segments that are left for a command at another node."""
PATIENCE_S: Final = 2.0
PAUSE_S: Final = 0.1
PROBE_BYTES: Final = 1 << 20
PROBE_S: Final = 0.2
NAME: Final = "tokenlake check"
MATCH: Final = MatchOptions(request=NAME, independent=True)


class Crossing(NamedTuple):
    """What became of the bytes from one node to another."""

    source: str
    to: str
    outcome: str
    """`equal`: they arrived. `arrived`: so the node says, and nothing compared them here. `failed`: they did not, or
    differ. `not checked`."""
    seconds: float = 0.0
    nbytes: int = 0
    problem: str = ""
    cure: str = ""


class _Failed(Exception):
    """A step failed: the problem, and what to do."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.problem, self.cure = problem, cure


def layout_of(segment_bytes: int) -> OpaqueLayout:
    """The layout of the segments of a check. Each stands for one token, so that the counters of tokens hardly grow."""
    return OpaqueLayout(
        model_id=NAME,
        weights_digest="00",
        engine=NAME,
        cache="bytes that follow from the key",
        shards=1,
        shard_bytes=segment_bytes,
        segment_tokens=1,
    )


def content_of(key: SegmentKey, nbytes: int) -> bytes:
    """The bytes of a segment; they follow from its key."""
    return np.random.default_rng(list(key)).bytes(nbytes)


class Checker:
    """Sends segments between nodes. `here`: the node to whose engines' socket `pool` is connected."""

    def __init__(self, here: Node, pool: Pool, layout: OpaqueLayout) -> None:
        self._here = here
        self._pool = pool
        self._layout = layout
        self._tenant = str(pool.engine.tenant)
        self._late = 0
        """Transfers of the pair that were late and tried again."""

    def between(self, source: Node, to: Node) -> Crossing:
        """Send segments from one node to another, of which one may be this one."""
        keys = self._keys(secrets.token_hex(16))
        self._late = 0
        try:
            self._store(keys, TTL_S)
            if source is not self._here:
                try:
                    self._bring(keys, self._here, source)
                except _Failed as error:
                    problem = f"nothing comes to {source.name} that it could send: {error.problem}"
                    return Crossing(source.name, to.name, "not checked", problem=problem, cure=error.cure)
                self._drop(keys)
            seconds = self._bring(keys, source, to)
            nbytes = len(keys) * self._layout.segment_bytes
            if to is not self._here:
                if source is self._here:
                    self._drop(keys)
                else:
                    self._evict(source, keys)
                try:
                    self._bring(keys, to, self._here)
                except _Failed as error:
                    problem = f"not compared, because nothing comes back from {to.name}: {error.problem}"
                    return Crossing(source.name, to.name, "arrived", seconds, nbytes, problem, error.cure)
            self._compare(keys)
            if not self._late:
                return Crossing(source.name, to.name, "equal", seconds, nbytes)
            problem = f"late {self._late} times before: engines compute what comes late"
            cure = "`tokenlake doctor` measures the path; look for a busy machine"
            return Crossing(source.name, to.name, "equal", seconds, nbytes, problem, cure)
        except _Failed as error:
            return Crossing(source.name, to.name, "failed", problem=error.problem, cure=error.cure)
        except TokenLakeError as error:
            cure = "`tokenlake doctor` and the logs of both nodes say more"
            return Crossing(source.name, to.name, "failed", problem=one_line(error), cure=cure)
        finally:
            for node in {id(each): each for each in (source, to, self._here)}.values():
                # The time to live ends those of a node that does not answer.
                with contextlib.suppress(TokenLakeError, _Failed):
                    self._evict(node, keys)

    def leave(self) -> int:
        """Store segments that `take` finds from another node, for `LEFT_TTL_S`. Returns their bytes. Raises
        `TokenLakeError`."""
        keys = self._keys(self._here.name)
        try:
            self._evict(self._here, keys)
            self._store(keys, LEFT_TTL_S)
        except _Failed as error:
            raise TokenLakeError(f"{error.problem}; {error.cure}") from error
        return len(keys) * self._layout.segment_bytes

    def take(self, source: str) -> Crossing:
        """Bring the segments that were left at another node here, and compare them."""
        keys = self._keys(source)
        here = self._here.name
        try:
            # A copy of an earlier command would stand in for those of now.
            self._drop(keys)
            codes, seconds = self._patiently(keys, source, self._here)
            if codes.count(Code.MISSING):
                return Crossing(
                    source,
                    here,
                    "not checked",
                    problem=f"{source} has none of the segments of `--leave`, or is not reached",
                    cure=f"run `tokenlake check --leave` on the machine of {source}, then this command again",
                )
            self._arrived(codes, self._here, source)
            self._compare(keys)
            return Crossing(source, here, "equal", seconds, len(keys) * self._layout.segment_bytes)
        except _Failed as error:
            return Crossing(source, here, "failed", problem=error.problem, cure=error.cure)
        except TokenLakeError as error:
            return Crossing(source, here, "failed", problem=one_line(error), cure="see the logs of both nodes")
        finally:
            with contextlib.suppress(TokenLakeError, _Failed):
                self._evict(self._here, keys)

    # -- steps

    def _keys(self, name: str) -> list[SegmentKey]:
        digests = [hashlib.blake2b(f"{name} {index}".encode(), digest_size=32).digest() for index in range(SEGMENTS)]
        return self._pool.opaque_keys([(0, digest) for digest in digests], salt=NAME)

    def _store(self, keys: Sequence[SegmentKey], ttl_s: float) -> None:
        nbytes = self._layout.segment_bytes
        contents = [np.frombuffer(content_of(key, nbytes), dtype=np.uint8) for key in keys]
        hints = Hints(priority=-1, ttl_s=ttl_s)
        codes = self._pool.store_all(keys, contents, patience=PATIENCE_S, request=NAME, hints=hints)
        if codes.count(Code.COMMITTED) != len(keys):
            code = next(Code(each) for each in codes if each != Code.COMMITTED)
            raise _Failed(*_refusal(self._here.name, code))

    def _bring(self, keys: Sequence[SegmentKey], source: Node, to: Node) -> float:
        """Bring segments from a node to another one, to which no copy of them is nearer. Returns the seconds."""
        codes, seconds = self._patiently(keys, source.name, to)
        self._arrived(codes, to, source.name)
        return seconds

    def _patiently(self, keys: Sequence[SegmentKey], source: str, to: Node) -> tuple[bytes, float]:
        """One code for each segment, and the seconds of the last attempt. Transfers that are late are tried again for
        `PATIENCE_S`, and counted: on a busy machine, or behind a restart, where the first one finds a connection that
        has ended."""
        until = time.monotonic() + PATIENCE_S
        while True:
            began = time.monotonic()
            codes = self._brought(keys, source, to)
            seconds = time.monotonic() - began
            if not (codes.count(Code.LOST) or codes.count(Code.MISSING)) or time.monotonic() > until:
                return codes, seconds
            self._late += 1
            time.sleep(PAUSE_S)

    def _brought(self, keys: Sequence[SegmentKey], source: str, to: Node) -> bytes:
        """One code for each segment."""
        if to is self._here:
            return self._pool.prefetch(keys, source=source)
        prompt = scheduling_pb2.Prompt(keys=join_keys(list(keys)), fingerprint=bytes(self._layout.fingerprint()))
        message = scheduling_pb2.PrefetchRequest(
            prompt=prompt, source=source, tenant=self._tenant, layout=self._layout.encode()
        )
        try:
            answer = to.control.prefetch(message)
        except TokenLakeError as error:
            raise _Failed(f"{to.name} does not bring segments: {one_line(error)}", _cure_of_call(error)) from error
        counts = {
            Code.LOCAL: answer.here,
            Code.MISSING: answer.missing,
            Code.LOST: answer.lost,
            Code.NO_SLOT: answer.refused,
        }
        return b"".join(bytes([code]) * count for code, count in counts.items())

    def _arrived(self, codes: bytes, to: Node, source: str) -> None:
        """Raises `_Failed` with the reason unless all codes are LOCAL."""
        bad = [Code(each) for each in codes if each != Code.LOCAL]
        if not bad:
            return
        if bad[0].refused:
            raise _Failed(*_refusal(to.name, bad[0]))
        problem = f"{len(bad)} of {SEGMENTS} segments did not come from {source} to {to.name} in time"
        if bad[0] == Code.MISSING:
            problem = f"{to.name} does not get segments that {source} has"
        raise _Failed(*self._reason(problem, to, source))

    def _reason(self, problem: str, to: Node, source: str) -> tuple[str, str]:
        """The problem with what the node knows about its connections with the source, and the cure."""
        with contextlib.suppress(TokenLakeError):
            status = to.control.status()
            for peer in status.peers:
                if peer.node == source and peer.state != "connected":
                    return f"{problem}: {peer.state}: {peer.reason}", cure_of(peer)
            for path in to.control.measure(source, PROBE_BYTES, PROBE_S):
                if path.problem:
                    cure = f"let the firewall pass TCP from {to.name} to that address ('listen', 'bulk_listen')"
                    return f"{problem}: {path.address or 'its address'}: {path.problem}", cure
        return problem, f"`tokenlake doctor` and the logs of {source} and {to.name} say more"

    def _compare(self, keys: Sequence[SegmentKey]) -> None:
        """Read the segments here, and compare their bytes. Raises `_Failed` where they differ."""
        with self._pool.match(keys, MATCH) as lease:
            found = [bytes(each) for each in lease.fetch(0, lease.hits)]
            keys_found = list(lease.keys)
        equal = sum(
            each == content_of(key, self._layout.segment_bytes) for key, each in zip(keys_found, found, strict=False)
        )
        if len(found) < len(keys):
            raise _Failed(f"only {len(found)} of {len(keys)} segments could be read here", "run the command again")
        if equal < len(keys):
            raise _Failed(
                f"{len(keys) - equal} of {len(keys)} segments have other bytes than were sent",
                "test the memory of both machines (`memtest86`), and report it: checksums should have found this",
            )

    def _drop(self, keys: Sequence[SegmentKey]) -> None:
        """Evict the segments here, and wait until they are gone: another node's transfer may still hold them."""
        until = time.monotonic() + PATIENCE_S
        while True:
            self._evict(self._here, keys)
            with self._pool.match(keys, MATCH) as lease:
                if not lease.codes.count(Code.LOCAL):
                    return
            if time.monotonic() > until:
                raise _Failed(f"{self._here.name} does not let segments go", "see the log of its daemon")

    def _evict(self, node: Node, keys: Sequence[SegmentKey]) -> None:
        try:
            node.control.evict(keys=keys, tenant=self._tenant)
        except TokenLakeError as error:
            raise _Failed(f"{node.name} does not evict segments: {one_line(error)}", _cure_of_call(error)) from error


def segment_bytes(nodes: Sequence[Node], tenant: str | None, otherwise: int) -> int:
    """The size of segments that most nodes have memory for: of those of the tenant's engines (None: of any), so that a
    check takes no region of memory from them. `otherwise`: where there are none."""
    counts: dict[int, int] = {}
    for node in nodes:
        for size in {pool.slot_bytes for pool in node.status.pools if tenant in (None, pool.tenant)}:
            counts[size] = counts.get(size, 0) + 1
    return min(counts, key=lambda size: (-counts[size], size), default=otherwise)


def probe(to: Node, source: str) -> Iterator[admin_pb2.Path]:
    """The paths over which probes come from a node that cannot be asked itself."""
    with contextlib.suppress(TokenLakeError):
        yield from to.control.measure(source, PROBE_BYTES, PROBE_S)


def _cure_of_call(error: TokenLakeError) -> str:
    text = str(error)
    if "role" in text or "admin" in text:
        return "give a certificate with the role admin (`tokenlake ca issue NAME --role admin`)"
    if "tenant" in text:
        return "give all nodes the same [[tenants]]"
    return "look at the log of its daemon"


def _refusal(node: str, code: Code) -> tuple[str, str]:
    """Why a node takes no segment of a check, and the cure."""
    if code == Code.QUOTA:
        return f"the tenant's quota of the memory of {node} is used", "raise its `quota`, or wait until requests end"
    if code == Code.WRITE_BUDGET:
        return f"all that may be written at a time in the memory of {node} is", "run the command again"
    return (
        f"{node} has no memory for {SEGMENTS} segments ({code.name}): it is leased, pinned, or of other sizes",
        "run the command again when fewer requests run; `tokenlake status` shows the memory",
    )
