"""Prefill and decode on different engines: the fields of vLLM's `kv_transfer_params` and the tail of a prompt. Imports
no engine.

A proxy sends a prompt to one engine, which computes it, and then, with the `kv_transfer_params` of the answer, to
another engine, which generates the tokens::

    proxy                  engine A, prefill                pool                  engine B, decode
      | do_remote_decode ---->|
      |                       | step with the last token of the prompt:
      |                       |   in-flight markers ------->|
      |                       |   full segments, tail ----->|
      |<-- do_remote_prefill, |
      |    remote_block_ids --|
      | the same fields ------------------------------------------------------------->|
      |                                                     |<-- match: segments, tail |  waits for segments in flight
      |                                                     |--- lease --------------->|  loads all tokens but the last
      |<------------------------------------------------------------- first token -----|  computes one token

The tail is the part of the prompt behind its last full segment. Its key covers all tokens of the prompt, so no other
prompt has it, and only a request with the fields of the prefill looks it up. It is kept for `UNREAD.ttl_s`, and is
among the first segments to be evicted from then on, or from the time it was read.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake_client.engines.vllm.served_request import DECODE, PREFILL

UNREAD = Hints(priority=1, ttl_s=60.0)
"""Hints for the tail of a prompt until an engine has read it."""
READ = Hints(priority=-1, ttl_s=0.001)
"""Hints for the tail of a prompt after an engine has read it."""
LEAST_WAIT_S = 0.25
"""Seconds: the least limit of the wait for segments that another engine has computed and is storing, also where this
engine computes them in less time."""
EXPECTED_S = 0.1
"""Seconds for which a lookup waits for such segments without in-flight markers: those that the other engine has set
before its answer may arrive at their directory nodes later than the lookup."""
UNKNOWN_PREFILL_S = 1.0
"""Seconds: the assumed time to compute a prompt where neither engine has measured prefills."""

_KEYS, _SECONDS = "remote_block_ids", "remote_prefill_s"
MAX_TAILS = 64
"""The number of tails of very short prompts that an engine stores in a row."""
MAX_KEYS = 1 << 14
"""Limit of the segments that a request names, whose check takes time of the engine's step."""
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """The statement that another engine has computed the request's tokens and stores them."""

    keys: tuple[str, ...] = ()
    """The keys of the segments that it stores, in hexadecimal digits, from the first on; empty: not known, as for a
    request that moves."""
    seconds: float = UNKNOWN_PREFILL_S
    """The predicted time in which that engine computes the tokens."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The segments that this engine stores for the engine that decodes a prompt."""

    keys: tuple[SegmentKey, ...]
    """The keys of the segments of the prompt, from the first on; the last one may be that of the tail."""
    tokens: int
    """The number of tokens of the prompt."""
    seconds: float | None
    """The predicted time in which this engine computes the prompt; None: not known."""

    def fields(self, request: str, engine: str) -> dict[str, Any]:
        """The `kv_transfer_params` in the answer to `request`, which proxies pass on to the engine that decodes.
        `engine`: vLLM's name of this engine."""
        return {
            PREFILL: True,
            DECODE: False,
            "remote_engine_id": engine,
            "remote_request_id": request,
            _KEYS: [key.hex() for key in self.keys],
            "remote_num_tokens": self.tokens,
            **({} if self.seconds is None else {_SECONDS: self.seconds}),
        }


@dataclass(frozen=True, slots=True)
class Split:
    """The part of a request that this engine serves, where prefill and decode have different engines."""

    decodes_elsewhere: bool = False
    """True: the engine computes the prompt for another engine."""
    prefill: RemotePrefill | None = None
    """The statement of the engine that has computed the request's tokens; None: there is none."""


NOT_SPLIT = Split()
"""One engine serves the whole request."""


def split_of(params: object) -> Split:
    """The fields of a request's `kv_transfer_params`, which a client of vLLM may set to any value. Raises `ValueError`
    that names an invalid field."""
    if not isinstance(params, Mapping):
        return NOT_SPLIT
    if params.get(DECODE):
        return Split(decodes_elsewhere=True)
    if not params.get(PREFILL):
        return NOT_SPLIT
    keys, seconds = params.get(_KEYS) or [], params.get(_SECONDS, UNKNOWN_PREFILL_S)
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise ValueError(f"field {_SECONDS!r} of kv_transfer_params is {reprlib.repr(seconds)}; expected seconds")
    if isinstance(keys, list) and len(keys) > MAX_KEYS:
        raise ValueError(f"field {_KEYS!r} of kv_transfer_params has {len(keys)} elements; at most {MAX_KEYS}")
    if not isinstance(keys, list) or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise ValueError(f"field {_KEYS!r} of kv_transfer_params is {reprlib.repr(keys)}; expected keys of segments")
    return Split(prefill=RemotePrefill(tuple(keys), seconds))


class TailRoom:
    """Bounds the room that the tails of an engine take: each takes the room of a segment, whatever its length. Their
    unused room, in tokens, does not exceed that of `MAX_TAILS` segments and the tokens of all prompts together."""

    def __init__(self, segment: int) -> None:
        """`segment`: the number of tokens of a segment."""
        self._segment = segment
        self._left = self._most = MAX_TAILS * segment

    def take(self, prompt: int) -> bool:
        """True if there is room for the tail of a prompt of `prompt` tokens, which the caller then stores."""
        self._left = min(self._most, self._left + prompt)
        unused = self._segment - prompt % self._segment
        if unused > self._left:
            return False
        self._left -= unused
        return True


def has_tail(tokens: int, segment: int) -> bool:
    """True if an engine that decodes needs the tail of a prompt of `tokens` tokens. It computes the last token
    itself."""
    return (tokens - 1) % segment > 0 and tokens % segment > 0
