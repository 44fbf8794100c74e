"""The settings of the adapter: keys of `adapter_params`, or variables of the environment. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from tokenlake.config.kinds import Text
from tokenlake.config.setting import Setting
from tokenlake.errors import ConfigurationError
from tokenlake_client.engines.common.page_settings import PageSettings


class AdapterSettings(PageSettings, frozen=True, kw_only=True):
    """The adapter's settings. A page is one of LMCache's objects."""

    engine: Annotated[
        Text,
        Setting(
            "name of the engine and its version, with all settings that change what its cache holds: quantization, "
            "dtype, attention backend, changes of the configuration. Servers share only with servers of the same text",
            why="LMCache does not tell an adapter which engine it serves",
            default="none: the start fails without it",
        ),
    ] = ""
    chunk_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="tokens"),
        Setting(
            "the server's `--chunk-size`. Servers share only with servers of the same number",
            why="LMCache's own default",
        ),
    ] = 256
    lease_s: Annotated[
        float,
        Meta(ge=0.001, le=600, description="seconds"),
        Setting(
            "time for which objects that a lookup has found stay leased where LMCache does not unlock them",
            why="LMCache unlocks after each load",
        ),
    ] = 60.0
    weights_digest: Annotated[
        Text | None,
        Setting(
            "name of weights and configuration; engines with the same name share, whatever they load",
            why="files with other contents get another digest by themselves",
            default="digest of the directory that the engine's `--model` names; needed where that is no directory",
        ),
    ] = None


def read_settings(params: Mapping[str, object], environ: Mapping[str, str]) -> AdapterSettings:
    """The settings in `params` (LMCache's `adapter_params`) and `environ` (variables of the environment); `params`
    takes precedence. Raises `ConfigurationError` for the first setting that is unknown or invalid, and where `engine`
    is missing."""
    settings = AdapterSettings.of(params, "adapter_params", environ)
    if not settings.engine:
        raise ConfigurationError("engine", settings.engine, "the engine, its version and its settings")
    return settings
