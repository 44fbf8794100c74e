"""The settings of the connector: keys of `kv_connector_extra_config`, or variables of the environment. Imports no
engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.config import ENGINE_PREFIX
from tokenlake.config.kinds import OptionalSocketPath, OptionalUid, Text
from tokenlake.config.setting import Setting, read
from tokenlake.config.sources import of_environment
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's settings. `read_settings` makes this object and checks the values. Names end in their unit."""

    socket: Annotated[
        OptionalSocketPath,
        Setting(
            "socket of this node's daemon",
            why="a node with the default name needs no setting",
            default="the socket of a daemon named `local`, of this user or of the system "
            "([places](reference.md#the-local-socket))",
        ),
    ] = ""
    daemon_uid: Annotated[
        OptionalUid,
        Setting(
            "user that the daemon runs as. The connector sends nothing to a process of another user: vLLM serves "
            "without the pool, and a warning names the process",
            why="root, the engine's user and the owner of `/run/tokenlake` are trusted without it",
            default="none",
        ),
    ] = None
    credential: Annotated[
        Text | None,
        Setting(
            "token of the tenant",
            why="the daemon knows the tenant by the engine's user id",
            default="none",
            secret=True,
        ),
    ] = None
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
    save: Annotated[
        bool,
        Setting(
            "store new segments; false: only read from the pool",
            why="other engines can use the segments",
        ),
    ] = True
    verify: Annotated[
        bool,
        Setting(
            "check each segment's checksum on every read. A wrong one is reported to the daemon and recomputed. Reads "
            "over the network are always checked",
            why="it costs a pass over the bytes of every read",
        ),
    ] = False
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
    call_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of the calls that the daemon answers from its own memory, such as the first one of a load. A new "
            "connection gets the same time, and at least 5 s",
            why="a daemon that is not overloaded answers within milliseconds; a frozen one costs a load this much",
        ),
    ] = 1e3 * DEFAULT_DEADLINES.call_s
    fetch_ms: Annotated[
        float,
        Meta(ge=0, le=60_000, description="milliseconds"),
        Setting(
            "deadline of the transfers of a load, 32 segments at a time; 0: the daemon predicts it from the rate of "
            "earlier transfers",
            why="a slow network gets more time, and a frozen node costs little",
        ),
    ] = 1e3 * DEFAULT_DEADLINES.fetch_s
    salt: Annotated[
        Text | None,
        Setting(
            "part of every key: engines share only with engines of the same salt. The `cache_salt` of a request is "
            "part of its keys too, apart from this one: a client that sends the salt of another engine shares nothing "
            "with it",
            why="all engines of a tenant share",
            default="none",
        ),
    ] = None
    weights_digest: Annotated[
        Text | None,
        Setting(
            "name of weights and configuration; engines with the same name share, whatever they load",
            why="files with other contents get another digest by themselves",
            default="digest of the model's directory ([details](#what-is-shared-with-whom))",
        ),
    ] = None
    write_queue: Annotated[
        int,
        Meta(ge=1, le=65536),
        Setting(
            "steps whose segments wait to be stored; the segments of further steps are not stored",
            why="bounds the queue; a waiting step holds no memory but the numbers of its blocks",
        ),
    ] = 64
    write_patience_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="seconds"),
        Setting(
            "time from the end of a step for which storing its segments waits, behind the engine, while the write "
            "budget of the pool is full. The daemon gets the same time to answer a store, and at least 2 s",
            why="a short burst of writes does not lose segments",
        ),
    ] = 1.0

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of the connections to the daemon. Lookups have their own, `match_ms`."""
        call_s = self.call_ms / 1e3
        return Deadlines(
            connect_s=max(DEFAULT_DEADLINES.connect_s, call_s),
            call_s=call_s,
            fetch_s=self.fetch_ms / 1e3,
            store_s=max(DEFAULT_DEADLINES.store_s, self.write_patience_s),
        )


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> EngineSettings:
    """The settings in `extra` (`kv_connector_extra_config`) and `environ` (variables of the environment); `extra` takes
    precedence. Raises `ConfigurationError` for the first setting that is unknown or invalid, also for a variable that
    `extra` overrides."""
    given = [
        *of_environment(environ, ENGINE_PREFIX),
        *((str(name), value, "kv_connector_extra_config") for name, value in extra.items()),
    ]
    values, _ = read(EngineSettings, given)
    return EngineSettings(**values)
