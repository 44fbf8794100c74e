"""`tokenlake explain`: the tokens that one request found and missed, from this node's daemon over the local socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from tokenlake import errors
from tokenlake.config import DEFAULT, ENGINE_PREFIX, load_config
from tokenlake.errors import DeadlinePassed, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.local_socket import first_reachable, sockets_to_try
from tokenlake.wire import engine, pack_frame
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.frames import decode
from tokenlake.wire.funnel import MAX_EXPLAINED_NAMES, Funnel
from tokenlake_server.blocking_sockets import read_frame
from tokenlake_server.config_file import read_foreign_file
from tokenlake_server.local_socket import dial
from tokenlake_server.tables import print_table

__all__ = ["Explanation", "ask", "explain"]

ANSWER_S = 2.0
"""Seconds that each operation on the socket may take. A daemon waits at most 0.1 s for the answers of other nodes, so
this is ample."""
MAX_ANSWER = 1 << 20


class Explanation(NamedTuple):
    """A daemon's answer: the funnel of one request (its tokens by hit and by reason of a miss), or the names of
    requests among which the caller has to choose."""

    funnel: Funnel | None
    names: tuple[str, ...]
    """Names of requests that begin with the name that was asked for, newest first, if there is no funnel."""


def ask(path: Path, request: str, token: str | None = None, daemon_uid: int | None = None) -> Explanation:
    """Ask the daemon at `path` about a request of this user's tenant, or of the token's tenant. `request`: the name of
    the request, or its beginning; empty for the names of the newest requests. `daemon_uid`: the user that the daemon
    runs as, where that is neither root nor this process's user. Raises `Unreachable`, `DeadlinePassed`,
    `ListenerUntrusted`, and the error with which the daemon refuses."""
    try:
        with dial(str(path), daemon_uid, ANSWER_S) as sock:
            sock.sendall(pack_frame(engine.Explain(1, request[:MAX_REQUEST_NAME], token)))
            body = read_frame(sock, MAX_ANSWER)
    except TimeoutError:
        raise DeadlinePassed(f"the daemon at {path} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unreachable(f"no daemon at {path}: {reason}; is it running, and is this its socket?") from error
    reply = decode(engine.reply_decoder, body)
    if isinstance(reply, engine.Failed):
        kind = getattr(errors, reply.kind, ProtocolRefused)
        raise kind(reply.reason)
    if not isinstance(reply, engine.Explained):
        raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}; expected Explained")
    return Explanation(reply.funnel, reply.names)


def _rows(funnel: Funnel) -> Iterator[tuple[str, int, str]]:
    """The lines of the table of one request's tokens: (stage or reason of a miss, tokens, detail)."""
    indexed = funnel.here + sum(count for _, count in funnel.elsewhere)
    places = [f"{funnel.node} (here) {funnel.here:,}"] if funnel.here else []
    places += [f"{node} {count:,}" for node, count in funnel.elsewhere]
    yield "ideal", funnel.ideal, f"segments of {funnel.segment_tokens}"
    yield "indexed", indexed, ", ".join(places)
    yield "fetched", funnel.fetched, ""
    yield "useful", funnel.useful, f"{funnel.held:,} more are leased still" if funnel.held else ""
    yield "missed", sum(missed.tokens for missed in funnel.missed), ""
    for missed in funnel.missed:
        yield f"  {missed.reason.replace('_', ' ')}", missed.tokens, missed.detail


class _Daemon(NamedTuple):
    """The daemon that is asked, and the credential of the caller."""

    places: tuple[str, ...]
    """Paths of the daemon's possible sockets, of which the first reachable one is used."""
    token: str | None
    uid: int | None

    def ask(self, request: str) -> tuple[str, Explanation]:
        """Ask the daemon about a request. Returns (path of the socket, answer). Raises the errors of the function
        `ask`."""
        return first_reachable(
            self.places, lambda place: (place, ask(Path(place), request, self.token, self.uid)), os.listdir
        )


@click.command()
@click.argument("request_id", required=False)
@click.option("--last", type=click.IntRange(1, MAX_EXPLAINED_NAMES), help="Explain the N newest requests.")
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="The daemon's TOML file.")
@click.option("--node", default=None, help="Name of the daemon's node, where its socket has the default path.")
@click.option("--socket", "path", default=None, help="Path of the daemon's socket.")
@click.option(
    "--daemon-uid",
    type=int,
    default=None,
    envvar=f"{ENGINE_PREFIX}DAEMON_UID",
    help="The user that the daemon runs as, where that is neither root nor you.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per request instead of a table.")
def explain(
    request_id: str | None,
    last: int | None,
    file: Path | None,
    node: str | None,
    path: str | None,
    daemon_uid: int | None,
    as_json: bool,
) -> None:
    """Show how many tokens of a request were found, and why the others were missed.

    REQUEST_ID is the engine's id of the request, as its log shows it, or the beginning of the id. An OpenAI server may
    return a shorter id than the engine uses: that beginning is enough. Ask the node whose daemon the engine used. Only
    requests of your own tenant are shown: by your uid, or by the token in TOKENLAKE_ENGINE_CREDENTIAL.
    """
    if (request_id is None) == (last is None):
        raise click.UsageError("expected either REQUEST_ID or --last N")
    try:
        daemon = _daemon(file, node, path, daemon_uid)
        if last is None:
            funnels = [_one(*daemon.ask(request_id or ""), request_id or "")]
        else:
            place, newest = daemon.ask("")
            answers = [daemon.ask(name)[1].funnel for name in newest.names[:last]]
            funnels = [funnel for funnel in answers if funnel is not None]
            if not funnels:
                raise click.ClickException(f"the daemon at {place} remembers no request of this tenant")
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    for funnel in funnels:
        _print(funnel, as_json)


def _daemon(file: Path | None, node: str | None, path: str | None, daemon_uid: int | None) -> _Daemon:
    text = read_foreign_file(file) if file is not None else None
    user, flags = os.geteuid(), {"node": node, "socket": path}
    settings = load_config(toml_text=text, environ=os.environ, flags=flags, uid=user, file=str(file))
    places: tuple[str, ...] = (settings.config.socket,)
    if settings.origin["socket"] == DEFAULT:
        places = sockets_to_try(os.environ, settings.config.node, user)
    return _Daemon(places, os.environ.get(f"{ENGINE_PREFIX}CREDENTIAL") or None, daemon_uid)


def _one(place: str, answer: Explanation, request_id: str) -> Funnel:
    """The funnel (tokens by hit and by reason of a miss) in the daemon's answer. Raises `click.ClickException` where no
    request, or more than one, has the name."""
    if answer.funnel is not None:
        return answer.funnel
    if answer.names:
        names = "\n  ".join(map(_printable, answer.names))
        raise click.ClickException(
            f"several requests begin with {request_id!r}; give more of the name of one:\n  {names}"
        )
    raise click.ClickException(
        f"the daemon at {place} remembers no request {request_id!r} of this tenant. Possible reasons: the engine uses "
        "another id (`tokenlake explain --last 5` shows the newest ones), the engine uses another node, the request is "
        "too long ago, or its prompt has no full segment"
    )


def _print(funnel: Funnel, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_plain(funnel)))
        return
    title = escape(f"{_printable(funnel.request)}, {funnel.age_s:.1f} s ago")
    table = Table("request", "tokens", "", title=title, box=SIMPLE)
    table.columns[1].justify = "right"
    for name, tokens, detail in _rows(funnel):
        table.add_row(name, f"{tokens:,}", escape(_printable(detail)))
    print_table(table)


def _printable(text: str) -> str:
    """`text` with escapes in place of control characters: engines choose the names of requests, and a terminal would
    execute the sequences in them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _plain(funnel: Funnel) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(funnel),
        "elsewhere": dict(funnel.elsewhere),
        "missed": [msgspec.structs.asdict(missed) for missed in funnel.missed],
    }
