"""Short ways to load settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.config import ServerConfig, Settings, load_config
from tokenlake.config.setting import settings_of

FIELDS = tuple(settings_of(ServerConfig))
CERTIFICATE = {"certificate": "node.pem", "key": "node-key.pem", "ca": "ca.pem"}
"""The settings of a node whose connections are encrypted; loading does not open the files."""
SECRET = "00112233445566778899aabbccddeeff"


def load(toml: str | None = None, environ: Mapping[str, str] | None = None, /, **flags: Any) -> Settings:
    return load_config(toml_text=toml, environ=environ or {}, flags=flags, uid=0)


def tenant(name: str = "a", **fields: object) -> str:
    """A table of `tenants` in TOML; a field given as None is left out."""
    values = {"name": name, "secret": SECRET, **fields}
    lines = [f"{key} = {value!r}" for key, value in values.items() if value is not None]
    return "\n".join(["[[tenants]]", *lines, ""])
