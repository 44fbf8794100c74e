"""The settings of the backend: keys of `--hicache-storage-backend-extra-config`, or variables of the environment.
Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping

from tokenlake.errors import ConfigurationError
from tokenlake_client.engines.common.page_settings import PageSettings

SGLANG_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Keys of the same JSON that SGLang reads, or adds for its own backends."""


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> PageSettings:
    """The settings in `extra` (the JSON of `--hicache-storage-backend-extra-config`, without the keys that SGLang
    removes from it) and `environ` (variables of the environment); `extra` takes precedence. Raises
    `ConfigurationError` for the first setting that is unknown or invalid, and where `interface_v1` is not set."""
    if not extra.get("interface_v1"):
        raise ConfigurationError(
            "interface_v1", extra.get("interface_v1"), "1: SGLang gives the places of pages in its memory only then"
        )
    return PageSettings.of(extra, "hicache_storage_backend_extra_config", environ, SGLANG_KEYS)
