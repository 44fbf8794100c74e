"""A request as both connectors know it, and the fields that a client sends with it. Imports no engine."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenlake.hints import Hints, Outlook
from tokenlake_client.engines.vllm.adapters import AdapterUse, RequestAdapter

HINTS_KEY = "tokenlake"
"""The key in vLLM's `kv_transfer_params` under which a request carries its hints."""
DECODE, PREFILL = "do_remote_decode", "do_remote_prefill"
"""The keys in vLLM's `kv_transfer_params` of requests whose prefill and decode have different engines."""
MAX_SHOWN = 200
"""Limit of the characters of an error that a client's values may make long."""
_OUTLOOKS = {outlook.name.lower(): outlook for outlook in Outlook}
_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""A hash of vLLM's: BLAKE3, SHA-256 or SHA-512 in hexadecimal digits."""


class _RequestHints(msgspec.Struct, forbid_unknown_fields=True):
    """The hints of a request as its client states them."""

    outlook: Literal["unknown", "goes_on", "over"] = "unknown"
    category: str = ""
    priority: int = 0
    ttl_s: float = 0.0
    pin_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ServedRequest:
    """What both connectors know of a request on the scheduler's side: its hints, its adapter and its permissions."""

    hints: Hints | None = None
    """The hints that the request carried in vLLM's `kv_transfer_params`."""
    adapter: RequestAdapter | None = None
    """The request's LoRA adapter."""
    placed: bool = False
    """True: vLLM has given the request blocks. If it then asks for the request's matched tokens again, the request has
    lost its blocks and begins anew."""
    may_store: bool = True
    """False: the weights changed after the request got its blocks, so they may hold cache of two versions."""
    may_load: bool = True
    """False: a lookup was late or a load failed; the request does not use the pool again."""

    @property
    def identified(self) -> bool:
        """True if all values are known on which the keys depend."""
        return self.adapter is None or self.adapter.digest is not None

    @property
    def adapter_use(self) -> AdapterUse | None:
        """The request's adapter for the ranks."""
        return self.adapter.use if self.adapter is not None else None


def unnamed_media(features: Sequence[Any]) -> str | None:
    """The reason why the pool cannot serve a request with these inputs; None if it can. vLLM hashes the content of an
    input, unless the client names it (`multi_modal_uuids`): such a name may stand for another content elsewhere."""
    if all(_HASH.fullmatch(media_hash(feature)) for feature in features):
        return None
    return "requests whose images, sounds or videos have names of the client (multi_modal_uuids)"


def media_hash(feature: Any) -> str:
    """vLLM's name of an input: a hash of its content, or a name of the client."""
    # The identifier may have the name of a LoRA adapter before the hash; the keys have the adapter's digest.
    hashed: str = feature.mm_hash or feature.identifier
    return hashed


def hints_of(params: object) -> Hints | None:
    """The hints in a request's `kv_transfer_params`, which a client of vLLM may set to any value; None without hints::

        {"tokenlake": {"outlook": "goes_on", "category": "agent", "priority": 1, "ttl_s": 600}}

    Raises `ValueError` that names an unknown or invalid field.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params must be an object, and is {reprlib.repr(params)}")
    fields = params.get(HINTS_KEY)
    if fields is None:
        return None
    try:
        said = msgspec.convert(fields, _RequestHints)
        return Hints(_OUTLOOKS[said.outlook], said.category, priority=said.priority, ttl_s=said.ttl_s, pin_s=said.pin_s)
    except ValueError as error:
        text = str(error)
        shown = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}...{text[-MAX_SHOWN // 2 :]}"
        raise ValueError(f"field {HINTS_KEY!r} of kv_transfer_params: {shown}") from None


def traceparent_of(request: Any) -> str | None:
    """The span of the caller that vLLM got with a request; None without one. vLLM keeps the headers of a request only
    where its own traces are on (`--otlp-traces-endpoint`)."""
    headers = getattr(request, "trace_headers", None)
    found = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return found if isinstance(found, str) else None


def is_split(params: object) -> bool:
    """True if a request's `kv_transfer_params` state that different engines serve its prefill and its decode."""
    return isinstance(params, Mapping) and bool(params.get(DECODE) or params.get(PREFILL))
