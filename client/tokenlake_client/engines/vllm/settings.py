"""What a user may set: in `kv_connector_extra_config`, or in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokenlake.config import ENGINE_PREFIX, MASK
from tokenlake.errors import ConfigurationError

__all__ = ["PREFIX", "EngineSettings", "read_settings"]

PREFIX = ENGINE_PREFIX
"""The daemon takes every other variable that begins with TOKENLAKE_ for a setting of its own."""


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each field is a key of `kv_connector_extra_config`; in capitals behind `PREFIX`, a variable."""

    socket: str = ""
    """Of this node's daemon; empty: where `tokenlake serve` listens by default, as this user or as a service."""
    daemon_uid: int | None = None
    """The user that the daemon runs as, where that is neither root nor this process's."""
    credential: str | None = None
    """A token of the tenant; without one the daemon goes by uid."""
    segment_tokens: int = 256
    """Engines share when it is equal; a multiple of vLLM's block size."""
    load: Literal["sync", "async"] = "async"
    """`sync`: the step that needs the cache waits for it. `async`: other requests run meanwhile."""
    weigh_loads: bool = True
    """False: what the pool has is loaded also where computing it is expected to be faster."""
    save: bool = True
    """False: read from the pool and store nothing."""
    verify: bool = False
    """Check every segment's checksum when it is read, not only after it came over the network."""
    match_ms: float = 20.0
    """After this many milliseconds without an answer the prompt counts as unknown."""
    salt: str | None = None
    """Part of every key: engines share only with engines of the same salt."""
    weights_digest: str | None = None
    """Of the weights; computed from the model's directory where None."""
    write_queue: int = 64
    """Steps whose new segments wait to be stored; beyond it nothing is stored."""
    write_patience_s: float = 1.0
    """How long the writer waits, behind the engine, while the pool's write budget is full."""


_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(EngineSettings)}

_RANGES = {
    "daemon_uid": (0, (1 << 32) - 2),
    "segment_tokens": (1, 1 << 20),
    "match_ms": (0.001, 60_000),
    "write_queue": (1, 65536),
    "write_patience_s": (0, 3600),
}


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> EngineSettings:
    """`extra` wins over `environ`. Raises `ConfigurationError` naming an unknown or invalid field."""
    values: dict[str, object] = {
        name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)
    }
    values |= extra
    checked = {name: _checked(name, value, isinstance(value, str)) for name, value in sorted(values.items())}
    return EngineSettings(**checked)


def _checked(name: str, value: object, text: bool) -> Any:
    # A name that is not known may be a misspelt credential.
    shown = MASK if name not in _TYPES or name == "credential" else value
    if name not in _TYPES:
        raise ConfigurationError(name, shown, f"one of {', '.join(_TYPES)}")
    try:
        if isinstance(value, str) and name != "socket":
            value.encode()
        checked = msgspec.convert(value, _TYPES[name], strict=not text)
    except UnicodeEncodeError:
        # A variable may hold bytes that are no text; a path may, too.
        raise ConfigurationError(name, shown, "text in UTF-8") from None
    except msgspec.ValidationError as error:
        raise ConfigurationError(name, shown, str(error)) from None
    least, most = _RANGES.get(name, (None, None))
    if least is not None and checked is not None and not least <= checked <= most:
        raise ConfigurationError(name, value, f"a number from {least:g} to {most:g}")
    return checked
