"""The settings of a router's plug-in: variables of the environment, or the router's own configuration. Imports no
router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenlake.config import ROUTER_PREFIX
from tokenlake.config.kinds import Controls, Name, OptionalUid, Path, Text
from tokenlake.config.setting import Setting, read
from tokenlake.config.sources import of_environment


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The plug-in's settings. `read_settings` makes this object and checks the values. Names end in their unit."""

    control: Annotated[
        Controls,
        Setting(
            "control planes of daemons, in the order of preference: the path of a control socket on this machine, or "
            "NODE=HOST:PORT. A request is asked of the first one that answers and knows the model",
            why="a daemon with the default name needs no setting",
            default="the control socket of a daemon named `local`, of this user or of the system",
        ),
    ] = ()
    certificate: Annotated[
        Path,
        Setting(
            "certificate of the router (PEM), with the role `scheduler`; for control planes at HOST:PORT",
            why="a control socket on this machine needs none",
        ),
    ] = ""
    key: Annotated[
        Path,
        Setting(
            "its private key (PEM)",
            why="a control socket on this machine needs none",
        ),
    ] = ""
    ca: Annotated[
        Path,
        Setting(
            "certificate of the authority of the daemons' certificates (PEM)",
            why="a control socket on this machine needs none",
        ),
    ] = ""
    daemon_uid: Annotated[
        OptionalUid,
        Setting(
            "user that the daemon of a control socket runs as",
            why="root, the router's user and the owner of `/run/tokenlake` are trusted without it",
            default="none",
        ),
    ] = None
    credential: Annotated[
        Text | None,
        Setting(
            "token of the tenant",
            why="a pool with one tenant needs none, and a certificate may name the tenant",
            default="none",
            secret=True,
        ),
    ] = None
    fleet: Annotated[
        Name,
        Setting(
            "name under which the daemon keeps the requests under way; all routers that share instances have the same",
            why="most pools serve one fleet",
        ),
    ] = "default"
    deadline_ms: Annotated[
        float,
        Meta(ge=1, le=60_000, description="milliseconds"),
        Setting(
            "longest time that a choice may add to a request, for its tokens and the pool's answer together; then the "
            "router chooses by its own strategy",
            why="short beside the prefill of a prompt for which a choice matters",
        ),
    ] = 200.0
    tokenizer: Annotated[
        Path,
        Setting(
            "directory of the model's tokenizer, which is then loaded in the router (needs transformers); for fleets "
            "of one model. Chats are rendered as vLLM 0.32 does (arguments of tool calls, parts of text, tools); what "
            "the plug-in does not know how to render is left to `/tokenize`",
            why="vLLM's `/tokenize` gives exactly the tokens that vLLM computes, and serves any number of models",
            default="vLLM's `/tokenize`",
        ),
    ] = ""
    salt: Annotated[
        Text | None,
        Setting(
            "the setting `salt` of the engines' connector; the `cache_salt` of a request is found in the request",
            why="the default of the connector",
            default="none",
        ),
    ] = None


def read_settings(extra: Mapping[str, object], environ: Mapping[str, str]) -> RouterSettings:
    """The settings in `extra` (the router's own configuration) and `environ` (variables of the environment); `extra`
    takes precedence. Raises `ConfigurationError` for the first setting that is unknown or invalid, also for a variable
    that `extra` overrides."""
    given = [
        *of_environment(environ, ROUTER_PREFIX),
        *((str(name), value, "the router's configuration") for name, value in extra.items()),
    ]
    values, _ = read(RouterSettings, given)
    return RouterSettings(**values)
