"""The settings of the connector: keys of `kv_connector_extra_config`, or variables of the environment. Imports no
engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from tokenlake.config.setting import Setting
from tokenlake_client.engines.common.settings import PoolSettings


class EngineSettings(PoolSettings, frozen=True, kw_only=True):
    """The connector's settings. `read_settings` makes this object and checks the values."""

    segment_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        Setting(
            "tokens per segment, a multiple of vLLM's block size; engines share segments of the same length only",
            why="it is a multiple of the usual block sizes, 16 to 128",
        ),
    ] = 256
    weigh_loads: Annotated[
        bool,
        Setting(
            "compute what is predicted to take longer to load, and give up a load after half the time in which it is "
            "computed, at least 50 ms; false: load every hit, without that limit",
            why="a request should not become slower than without the pool",
        ),
    ] = True
    serve_inexact: Annotated[
        bool,
        Setting(
            "serve models too for which this build of vLLM computes other tokens behind a cached prefix than in a "
            "whole prefill ([latent attention on a CPU](#which-connector-serves-which-model))",
            why="the pool changes no answer",
        ),
    ] = False
    match_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of a lookup; without an answer the prompt is computed. It does not limit the wait for another "
            "instance [that computes the prompt](#the-same-prompt-on-several-instances)",
            why="short beside a prefill, and long for a daemon that is not overloaded",
        ),
    ] = 20.0
    write_queue: Annotated[
        int,
        Meta(ge=1, le=65536),
        Setting(
            "steps whose segments wait to be stored; the segments of further steps are not stored",
            why="bounds the queue; a waiting step holds no memory but the numbers of its blocks",
        ),
    ] = 64


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> EngineSettings:
    """The settings in `extra` (`kv_connector_extra_config`) and `environ` (variables of the environment); `extra` takes
    precedence. Raises `ConfigurationError` as `PoolSettings.of`."""
    return EngineSettings.of(extra, "kv_connector_extra_config", environ)
