"""The settings of integrations whose engine names its pages by hashes (`pages`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenlake.config.setting import Setting
from tokenlake_client.engines.common.settings import PoolSettings


class PageSettings(PoolSettings, frozen=True, kw_only=True):
    """The settings of one engine that looks up, loads and stores pages."""

    match_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of a lookup, beside 20 us for each page; without an answer the prompt is computed",
            why="short beside a prefill, and long for a daemon that is not overloaded",
        ),
    ] = 20.0
    lease_s: Annotated[
        float,
        Meta(ge=0.001, le=600, description="seconds"),
        Setting(
            "time for which pages that a lookup has found stay leased until the engine reads them. The engine does not "
            "tell that a request was aborted",
            why="an engine reads within a few of its steps, and the memory of a leased page cannot be used otherwise",
        ),
    ] = 10.0
