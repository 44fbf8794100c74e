"""The settings of the backend: keys of `--hicache-storage-backend-extra-config`, or variables of the environment.
Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.config import ENGINE_PREFIX
from tokenlake.config.kinds import OptionalSocketPath, OptionalUid, Text
from tokenlake.config.setting import Setting, read
from tokenlake.config.sources import of_environment
from tokenlake.errors import ConfigurationError
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines

SGLANG_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Keys of the same JSON that SGLang reads, or adds for its own backends."""


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The backend's settings. `read_settings` makes this object and checks the values. Names end in their unit."""

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
            "user that the daemon runs as. The backend sends nothing to a process of another user",
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
        Setting("store new pages; false: only read from the pool", why="other engines can use the pages"),
    ] = True
    verify: Annotated[
        bool,
        Setting(
            "check each page's checksum on every read. A wrong one is reported to the daemon and recomputed. Reads "
            "over the network are always checked",
            why="it costs a pass over the bytes of every read",
        ),
    ] = False
    match_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of a lookup, beside 20 us for each page; without an answer the prompt is computed",
            why="short beside a prefill, and long for a daemon that is not overloaded",
        ),
    ] = 20.0
    call_ms: Annotated[
        float,
        Meta(ge=0.001, le=60_000, description="milliseconds"),
        Setting(
            "deadline of the calls that the daemon answers from its own memory. A new connection gets the same time, "
            "and at least 5 s",
            why="a daemon that is not overloaded answers within milliseconds",
        ),
    ] = 1e3 * DEFAULT_DEADLINES.call_s
    fetch_ms: Annotated[
        float,
        Meta(ge=0, le=60_000, description="milliseconds"),
        Setting(
            "deadline of the transfers of a load, 32 pages at a time; 0: the daemon predicts it from the rate of "
            "earlier transfers",
            why="a slow network gets more time, and a frozen node costs little",
        ),
    ] = 1e3 * DEFAULT_DEADLINES.fetch_s
    lease_s: Annotated[
        float,
        Meta(ge=0.001, le=600, description="seconds"),
        Setting(
            "time for which pages that a lookup has found stay leased until SGLang reads them. SGLang does not tell a "
            "backend that a request was aborted",
            why="SGLang reads within a few of its steps, and the memory of a leased page cannot be used otherwise",
        ),
    ] = 10.0
    salt: Annotated[
        Text | None,
        Setting(
            "part of every key: engines share only with engines of the same salt. The `cache_salt` and the `extra_key` "
            "of a request are part of its keys too, because SGLang hashes them",
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
    write_patience_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="seconds"),
        Setting(
            "time for which storing a batch of pages waits, in SGLang's backup thread, while the write budget of the "
            "pool is full. After a batch that waited in vain the next ones do not wait until one is stored",
            why="a short burst of writes does not lose pages, and a long one does not hold SGLang's host memory",
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


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> StorageSettings:
    """The settings in `extra` (the JSON of `--hicache-storage-backend-extra-config`, without the keys that SGLang
    removes from it) and `environ` (variables of the environment); `extra` takes precedence. Raises
    `ConfigurationError` for the first setting that is unknown or invalid, and where `interface_v1` is not set."""
    if not extra.get("interface_v1"):
        raise ConfigurationError(
            "interface_v1", extra.get("interface_v1"), "1: SGLang gives the places of pages in its memory only then"
        )
    given = [
        *of_environment(environ, ENGINE_PREFIX),
        *(
            (str(name), value, "hicache_storage_backend_extra_config")
            for name, value in extra.items()
            if name not in SGLANG_KEYS
        ),
    ]
    values, _ = read(StorageSettings, given)
    return StorageSettings(**values)
