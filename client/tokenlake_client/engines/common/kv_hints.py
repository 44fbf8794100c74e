"""Hints of routers: the actions that a request carries, read as acts of the pool
(`docs/decisions/032-the-contract-of-hints.md`). Imports no engine.

::

    envelope (vLLM's `KvHintsEnvelope`, or the same as an object of JSON)
        | each action by itself: one that is not obeyed changes nothing of the others
        v
    retain, demote, pin       --> fields of the request's `Hints`
    prefetch, share, fetch    --> `Bring`: a prefetch
    all others                --> counted: unknown, malformed, refused
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tokenlake.hints import DEMOTE, MAX_PIN_S, MAX_TTL_S, NO_HINTS, RETAIN, Hints
from tokenlake.wire.fields import Name

ACTS = ("retain", "demote", "pin", "prefetch", "share")
OBEYED, MALFORMED, REFUSED, UNKNOWN = "obeyed", "malformed", "refused", "unknown"
OUTCOMES = (OBEYED, MALFORMED, REFUSED)
"""The outcomes of an action of a known name."""
MAX_ACTIONS = 16
"""Limit of the actions of one request; further ones are refused."""
MAX_PROMPT = 1 << 18
"""Limit of the tokens that the actions of one request name: the engine's scheduler hashes them between two steps."""
MAX_NAME = 64
"""Limit of the characters of the name of an action, and of its version."""
PIN_S = 600.0
"""Seconds of a pin that names none."""
KEYS = ("kv_hints", "kv_hint")
"""The keys in `kv_transfer_params` under which routers send an envelope to an engine without a field for it."""
_ALIASES = {"fetch": "share"}
_VERSION = re.compile(r"1(\.\d+)*")


_Short = Annotated[str, Meta(max_length=MAX_NAME)]


class _Action(msgspec.Struct):
    action_type: _Short
    action_version: _Short
    payload: dict[str, Any]


class _Retain(msgspec.Struct, forbid_unknown_fields=True):
    priority: Annotated[int, Meta(ge=0, le=1)] = 1
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] = 0.0


class _Demote(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_PIN_S)] = PIN_S


_Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=MAX_PROMPT)]


class _Prefetch(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: _Tokens | None = None


class _Share(msgspec.Struct, forbid_unknown_fields=True):
    node: Name = ""
    token_ids: _Tokens | None = None


class _Fetch(msgspec.Struct):
    """Dynamo's `kv.fetch`, whose payload names an endpoint and hashes of Dynamo's: the directory names the source."""


_PAYLOADS: dict[str, type[msgspec.Struct]] = {
    "retain": _Retain,
    "demote": _Demote,
    "pin": _Pin,
    "prefetch": _Prefetch,
    "share": _Share,
    "fetch": _Fetch,
}


class Bring(NamedTuple):
    """A prompt that is to be brought to this node."""

    act: str
    """`prefetch` or `share`: the name by which it is counted."""
    tokens: Sequence[int] | None
    """None: the prompt of the request itself."""
    source: str
    """The node that has it; empty: the directory says which."""


class Acts(NamedTuple):
    """The actions of one request."""

    hints: Hints | None
    """The hints of the request, with those that the router adds; None without any."""
    brings: tuple[Bring, ...] = ()
    """The prompts to bring; their outcome is known when they are brought."""
    counted: tuple[tuple[str, str], ...] = ()
    """(act, outcome) of the other actions; the act is empty for an unknown one."""
    problems: tuple[str, ...] = ()
    """A text for each action that is not obeyed."""


def acts_of(envelope: object, hints: Hints | None) -> Acts:
    """The acts of an envelope. `hints`: those that the request carries otherwise. Never raises: what is not as expected
    is counted."""
    if envelope is None:
        return Acts(hints)
    # Only the actions that are obeyed are read: an envelope may have any size.
    actions = envelope.get("actions") if isinstance(envelope, Mapping) else getattr(envelope, "actions", None)
    if not isinstance(actions, list | tuple):
        return Acts(hints, (), (("", MALFORMED),), ("the envelope has no list of actions",))
    said, brings, left = hints or NO_HINTS, [], MAX_PROMPT
    counted: list[tuple[str, str]] = []
    problems: list[str] = []
    for number, action in enumerate(actions):
        if number == MAX_ACTIONS:
            counted += [("", REFUSED)] * (len(actions) - number)
            problems.append(f"{len(actions)} actions; the limit is {MAX_ACTIONS}")
            break
        name = ""
        try:
            one = msgspec.convert(action, _Action, from_attributes=True)
            kind = one.action_type.removeprefix("kv.").lower()
            payload = _PAYLOADS.get(kind)
            if payload is None:
                counted.append(("", UNKNOWN))
                problems.append(f"unknown action {reprlib.repr(one.action_type)}")
                continue
            name = _ALIASES.get(kind, kind)
            if not _VERSION.fullmatch(one.action_version):
                counted.append((name, REFUSED))
                problems.append(f"action {kind!r} of version {reprlib.repr(one.action_version)}; obeyed is version 1")
                continue
            body = msgspec.convert(one.payload, payload)
            tokens = len(getattr(body, "token_ids", None) or ())
            if tokens > left:
                counted.append((name, REFUSED))
                problems.append(f"the actions name more than {MAX_PROMPT} tokens")
                continue
            left -= tokens
        except Exception as error:
            counted.append((name, MALFORMED))
            problems.append(f"malformed action {name!r}: {str(error)[:200]}")
            continue
        match body:
            case _Retain():
                fields = {"outlook": RETAIN.outlook, "priority": body.priority, "ttl_s": body.ttl_s or said.ttl_s}
                said = msgspec.structs.replace(said, **fields)
            case _Demote():
                said = msgspec.structs.replace(said, outlook=DEMOTE.outlook, priority=DEMOTE.priority)
            case _Pin():
                said = msgspec.structs.replace(said, pin_s=body.ttl_s)
            case _Prefetch():
                brings.append(Bring(name, body.token_ids, ""))
            case _Share():
                brings.append(Bring(name, body.token_ids, body.node))
            case _Fetch():
                brings.append(Bring(name, None, ""))
        if not isinstance(body, _Prefetch | _Share | _Fetch):
            counted.append((name, OBEYED))
    return Acts(said if said != NO_HINTS or hints is not None else None, tuple(brings), tuple(counted), tuple(problems))


def envelope_of(request: Any) -> object:
    """The envelope of a request of an engine: its field `kv_hints`, else what its `kv_transfer_params` carry."""
    found = getattr(request, "kv_hints", None)
    params = getattr(request, "kv_transfer_params", None)
    if found is None and isinstance(params, Mapping):
        found = next((params[key] for key in KEYS if key in params), None)
    return found
