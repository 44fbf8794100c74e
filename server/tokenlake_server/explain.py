"""`tokenlake explain`: what became of one request, asked of this node's daemon over the local socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenlake import errors
from tokenlake.config import DEFAULT, ENGINE_PREFIX, load_config
from tokenlake.errors import DeadlinePassed, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.local_socket import first_reachable, sockets_to_try
from tokenlake.wire import FrameDecoder, engine, pack_frame
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.frames import decode
from tokenlake.wire.funnel import Funnel
from tokenlake_server.config_file import read_foreign_file
from tokenlake_server.local_socket import dial

__all__ = ["ask", "explain", "rows"]

ANSWER_S = 2.0
"""A daemon asks other nodes for at most a tenth of a second."""
MAX_ANSWER = 1 << 20


def ask(path: Path, request: str, token: str | None = None, daemon_uid: int | None = None) -> Funnel | None:
    """What the daemon at `path` knows of a request of this user's, or `token`'s, tenant; None where it knows none of
    that name. `daemon_uid`: the user that it runs as, where that is neither root nor this process's. Raises
    `Unreachable`, `DeadlinePassed`, `ListenerUntrusted`, and what the daemon refuses with."""
    try:
        with dial(str(path), daemon_uid, ANSWER_S) as sock:
            sock.sendall(pack_frame(engine.Explain(1, request[:MAX_REQUEST_NAME], token)))
            body = _receive(sock)
    except TimeoutError:
        raise DeadlinePassed(f"the daemon at {path} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(f"no daemon at {path}: {error.strerror}; is it running, and is this its socket?") from error
    reply = decode(engine.reply_decoder, body)
    if isinstance(reply, engine.Failed):
        kind = getattr(errors, reply.kind, ProtocolRefused)
        raise kind(reply.reason)
    if not isinstance(reply, engine.Explained):
        raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}")
    return reply.funnel


def _receive(sock: socket.socket) -> bytes:
    decoder = FrameDecoder(MAX_ANSWER)
    while True:
        received = sock.recv(1 << 16)
        if not received:
            raise ConnectionResetError(0, "it closed the connection")
        for body in decoder.feed(received):
            return body


def rows(funnel: Funnel) -> Iterator[tuple[str, int, str]]:
    """(stage or reason, tokens, detail), in the order of a funnel."""
    indexed = funnel.here + sum(count for _, count in funnel.elsewhere)
    places = [f"{funnel.node} (here) {funnel.here:,}"] if funnel.here else []
    places += [f"{node} {count:,}" for node, count in funnel.elsewhere]
    yield "ideal", funnel.ideal, f"segments of {funnel.segment_tokens}"
    yield "indexed", indexed, ", ".join(places)
    yield "fetched", funnel.fetched, ""
    yield "useful", funnel.useful, f"{funnel.held:,} more are held" if funnel.held else ""
    yield "missed", sum(missed.tokens for missed in funnel.missed), ""
    for missed in funnel.missed:
        yield f"  {missed.reason.replace('_', ' ')}", missed.tokens, missed.detail


@click.command()
@click.argument("request_id")
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="The daemon's TOML file.")
@click.option("--node", default=None, help="The daemon's node, where its socket is at the default place.")
@click.option("--socket", "path", default=None, help="The daemon's socket.")
@click.option(
    "--daemon-uid",
    type=int,
    default=None,
    envvar=f"{ENGINE_PREFIX}DAEMON_UID",
    help="The user that the daemon runs as, where that is neither root nor you.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def explain(
    request_id: str, file: Path | None, node: str | None, path: str | None, daemon_uid: int | None, as_json: bool
) -> None:
    """What became of one request, in tokens, and why the rest was missed.

    Ask on the node whose daemon the engine used. REQUEST_ID is the engine's name of it, as in the logs. Only requests
    of your own tenant are told: by your uid, or by the token in TOKENLAKE_ENGINE_CREDENTIAL.
    """
    try:
        text = read_foreign_file(file) if file is not None else None
        user, flags = os.geteuid(), {"node": node, "socket": path}
        settings = load_config(toml_text=text, environ=os.environ, flags=flags, uid=user, file=str(file))
        token = os.environ.get(f"{ENGINE_PREFIX}CREDENTIAL") or None
        places: tuple[str, ...] = (settings.config.socket,)
        if settings.origin["socket"] == DEFAULT:
            places = sockets_to_try(os.environ, settings.config.node, user)
        place, funnel = first_reachable(
            places, lambda each: (each, ask(Path(each), request_id, token, daemon_uid)), os.listdir
        )
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    if funnel is None:
        raise click.ClickException(
            f"the daemon at {place} remembers no request {request_id!r} of this tenant: it has "
            "another name, another node was asked, it was too long ago, or it had no full segment"
        )
    if as_json:
        click.echo(json.dumps(_plain(funnel)))
        return
    table = Table("request", "tokens", "", title=escape(f"{funnel.request}, {funnel.age_s:.1f} s ago"), box=SIMPLE)
    table.columns[1].justify = "right"
    for name, tokens, detail in rows(funnel):
        table.add_row(name, f"{tokens:,}", escape(detail))
    Console().print(table)


def _plain(funnel: Funnel) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(funnel),
        "elsewhere": dict(funnel.elsewhere),
        "missed": [msgspec.structs.asdict(missed) for missed in funnel.missed],
    }
