"""What a request says of itself in `kv_transfer_params`. Imports no engine.

::

    {"tokenlake": {"outlook": "goes_on", "category": "agent", "priority": 1, "ttl_s": 600}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.hints import Hints, Outlook

__all__ = ["KEY", "hints_of"]

KEY = "tokenlake"
_OUTLOOKS = {outlook.name.lower(): outlook for outlook in Outlook}
_FIELDS = {"outlook": str, "category": str, "priority": int, "ttl_s": int | float}


def hints_of(params: Mapping[str, Any] | None) -> Hints | None:
    """None where nothing is said. Raises `ValueError` naming the field that has no meaning."""
    said = (params or {}).get(KEY)
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"kv_transfer_params field {KEY!r} holds the fields {', '.join(_FIELDS)}")
    for name, value in said.items():
        if name not in _FIELDS:
            raise ValueError(f"kv_transfer_params field {KEY!r} holds {name!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise ValueError(f"field {name!r} of {KEY!r} in kv_transfer_params is {value!r}")
    outlook = said.get("outlook", "unknown")
    if outlook not in _OUTLOOKS:
        raise ValueError(f"field 'outlook' of {KEY!r} in kv_transfer_params is {outlook!r}; {', '.join(_OUTLOOKS)}")
    rest = {name: value for name, value in said.items() if name != "outlook"}
    return Hints(_OUTLOOKS[outlook], **rest)
