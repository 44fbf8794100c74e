"""The settings that every integration with an engine of its own process has: keys of the engine's flag, or variables of
the environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from tokenlake.config import ENGINE_PREFIX
from tokenlake.config.kinds import OptionalSocketPath, OptionalUid, Text
from tokenlake.config.setting import Setting, read
from tokenlake.config.sources import of_environment
from tokenlake.identity import SessionId
from tokenlake.opaque_layout import AnyLayout
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.engines.common.connection import Connection, declined
from tokenlake_client.pool import Pool


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one engine; an integration adds its own. `of` makes this object and checks the values. Names end
    in their unit."""

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
            "user that the daemon runs as. The engine sends nothing to a process of another user: it runs without the "
            "pool, and a warning names the process",
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
    save: Annotated[
        bool,
        Setting("store new segments; false: only read from the pool", why="other engines can use the segments"),
    ] = True
    verify: Annotated[
        bool,
        Setting(
            "check each segment's checksum on every read. A wrong one is reported to the daemon and recomputed. Reads "
            "over the network are always checked",
            why="it costs a pass over the bytes of every read",
        ),
    ] = False
    match_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of a lookup; without an answer the prompt is computed",
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
            default="digest of the model's directory ([details](#sharing))",
        ),
    ] = None
    write_patience_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="seconds"),
        Setting(
            "time for which storing segments waits, behind the engine, while the write budget of the pool is full. The "
            "daemon gets the same time to answer a store, and at least 2 s",
            why="a short burst of writes does not lose segments",
        ),
    ] = 1.0

    @classmethod
    def of(
        cls, given: Mapping[str, object], flag: str, environ: Mapping[str, str], theirs: Collection[str] = ()
    ) -> Self:
        """The settings in `given`, the value of the engine's flag `flag`, and in `environ` (variables of the
        environment); `given` takes precedence. `theirs`: keys in `given` that the engine reads. Raises
        `ConfigurationError` for the first setting that is unknown or invalid, also for a variable that `given`
        overrides."""
        own = [(str(name), value, flag) for name, value in given.items() if name not in theirs]
        values, _ = read(cls, [*of_environment(environ, ENGINE_PREFIX), *own])
        return cls(**values)

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

    def connect(self, layout: AnyLayout, session: int = 0, *, verify: bool | None = None) -> Pool:
        """A connection to the daemon; in a session that another process of this engine has opened, unless `session` is
        0. `verify`: in place of the setting. Raises the errors of `Pool.connect`."""
        return Pool.connect(
            self.socket or None,
            layout,
            self.credential,
            session=SessionId(session),
            verify=self.verify if verify is None else verify,
            daemon_uid=self.daemon_uid,
            deadlines=self.deadlines,
        )

    def decline(self, reason: str) -> Connection:
        """Tell the daemon why the pool does not serve the engine (`declined`)."""
        return declined(self.socket, self.daemon_uid, reason)
