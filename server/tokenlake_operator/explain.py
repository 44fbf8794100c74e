"""`tokenlake explain`: the tokens that one request found and missed.

A daemon of this machine is asked over the socket of engines, because users of tenants may not open the control socket;
one of another machine, and with --tenant any, over the control plane.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from tokenlake import errors
from tokenlake.errors import DeadlinePassed, ProtocolRefused, Refused, Unreachable
from tokenlake.wire import engine, pack_frame
from tokenlake.wire.fields import MAX_REQUEST_NAME
from tokenlake.wire.frames import decode
from tokenlake.wire.funnel import MAX_EXPLAINED_NAMES, Funnel, Missed
from tokenlake.wire.local_socket import first_reachable
from tokenlake_client.dial import dial
from tokenlake_operator.plain import plain
from tokenlake_operator.prompt_text import Prompt
from tokenlake_operator.reaching import ENGINES_SUFFIX, SUFFIX, Target, operates
from tokenlake_server.bulk.blocking_sockets import read_frame
from tokenlake_server.tables import print_rows, printable

if TYPE_CHECKING:
    from tokenlake_proto.v1 import admin_pb2

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
        with dial(path, daemon_uid, ANSWER_S)[0] as sock:
            sock.sendall(pack_frame(engine.Explain(1, request[:MAX_REQUEST_NAME], token)))
            try:
                body = read_frame(sock, MAX_ANSWER)
            except ProtocolRefused as error:
                raise ProtocolRefused(_not_of_engines(path)) from error
    except TimeoutError:
        raise DeadlinePassed(f"the daemon at {path} did not answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(f"the connection to the daemon at {path} broke: {error.strerror or error}") from error
    reply = decode(engine.reply_decoder, body)
    if isinstance(reply, engine.Failed):
        raise _as_error(reply)
    if not isinstance(reply, engine.Explained):
        raise ProtocolRefused(f"the daemon answered with {type(reply).__name__}; expected Explained")
    return Explanation(reply.funnel, reply.names)


def _not_of_engines(path: Path) -> str:
    if path.suffix == SUFFIX:
        engines = path.with_suffix(ENGINES_SUFFIX)
        return (
            f"{path} is the control socket; this command takes the socket of engines, by default {engines}, or also "
            "--tenant"
        )
    return f"{path} is not the socket of engines of a daemon"


def _as_error(failed: engine.Failed) -> Refused | Unreachable:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, Refused | Unreachable):
        return kind(failed.reason)
    return ProtocolRefused(failed.reason)


def _rows(funnel: Funnel) -> Iterator[tuple[str, int, str]]:
    """The lines of the table of one request's tokens: (stage or reason of a miss, tokens, detail)."""
    indexed = funnel.here + sum(count for _, count in funnel.elsewhere)
    places = [f"{funnel.node} (here) {funnel.here:,}"] if funnel.here else []
    places += [f"{node} {count:,}" for node, count in funnel.elsewhere]
    yield "ideal", funnel.ideal, f"segments of {funnel.segment_tokens}"
    yield "indexed", indexed, ", ".join(places)
    yield "fetched", funnel.fetched, ""
    yield "engine had", funnel.engine_had, ""
    yield "supplied", funnel.supplied, f"{funnel.held:,} more are leased still" if funnel.held else ""
    yield "missed", sum(missed.tokens for missed in funnel.missed), ""
    for missed in funnel.missed:
        yield f"  {missed.reason.replace('_', ' ')}", missed.tokens, missed.detail


Ask = Callable[[str], Explanation]
"""A function that asks one daemon about a request: its argument is the name of the request or the beginning of the
name. Raises `TokenLakeError`."""


@click.command()
@click.argument("request_id", required=False)
@click.option("--last", type=click.IntRange(1, MAX_EXPLAINED_NAMES), help="Explain this many of the newest requests.")
@click.option(
    "--tenant", default="", help="Name of the tenant of the request. Only an operator of the daemon may give it."
)
@click.option(
    "--prompt",
    "text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the text of the prompt, as the chat template renders it: shows the text at which it leaves what is "
    "known. With --tokenizer.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="The model's tokenizer.json, or the directory that has it.",
)
@partial(operates, socket_help="Path of the socket of engines; with --tenant that of the control socket.")
def explain(
    target: Target,
    request_id: str | None,
    last: int | None,
    tenant: str,
    text: Path | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Show how many tokens of a request the pool supplied, and why the others were missed.

    REQUEST_ID is the engine's id of the request, as its log shows it, or the beginning of the id. An OpenAI server may
    return a shorter id than the engine uses: that beginning is enough. Ask the node whose daemon the engine used. Only
    requests of your own tenant are shown: by your uid, by the token in TOKENLAKE_ENGINE_CREDENTIAL, or by your
    certificate.
    """
    if (request_id is None) == (last is None):
        raise click.UsageError("expected either REQUEST_ID or --last N")
    if request_id == "":
        raise click.UsageError("REQUEST_ID is empty; --last N shows the newest requests")
    if (text is None) != (tokenizer is None) or (text is not None and (request_id is None or as_json)):
        raise click.UsageError("--prompt and --tokenizer belong together, to one REQUEST_ID, and not to --json")
    prompt = None if text is None or tokenizer is None else Prompt(text, tokenizer)
    if tenant or target.remote is not None:
        with target.connect() as control:
            funnels = _funnels(lambda name: _explained(control.explain(name, tenant)), request_id, last, "this node")
    else:
        place, ask_daemon = _engine_socket(target)
        funnels = _funnels(ask_daemon, request_id, last, place)
    for funnel in funnels:
        _print(funnel, as_json, prompt)


def _funnels(ask_daemon: Ask, request_id: str | None, last: int | None, place: str) -> list[Funnel]:
    """The funnels of the request, or of the newest ones. Raises `click.ClickException` where there are none."""
    if request_id is not None:
        return [_one(place, ask_daemon(request_id), request_id)]
    answers = [ask_daemon(name).funnel for name in ask_daemon("").names[:last]]
    funnels = [funnel for funnel in answers if funnel is not None]
    if not funnels:
        raise click.ClickException(f"the daemon at {place} remembers no request of this tenant")
    return funnels


def _engine_socket(target: Target) -> tuple[str, Ask]:
    """The path of the daemon's socket of engines, and the function that asks there."""
    places = target.engine_sockets()

    def ask_at(place: str, name: str) -> Explanation:
        return ask(Path(place), name, target.token, target.daemon_uid)

    return " or ".join(places), lambda name: first_reachable(places, lambda place: ask_at(place, name), os.listdir)


def _explained(answer: admin_pb2.ExplainResponse) -> Explanation:
    """The answer of a control plane."""
    if not answer.HasField("funnel"):
        return Explanation(None, tuple(answer.names))
    fields = plain(answer.funnel)
    fields["elsewhere"] = tuple(fields["elsewhere"].items())
    fields["missed"] = tuple(Missed(**each) for each in fields["missed"])
    return Explanation(Funnel(**fields), ())


def _one(place: str, answer: Explanation, request_id: str) -> Funnel:
    """The funnel (tokens by hit and by reason of a miss) in the daemon's answer. Raises `click.ClickException` where no
    request, or more than one, has the name."""
    if answer.funnel is not None:
        return answer.funnel
    if answer.names:
        names = "\n  ".join(map(printable, answer.names))
        raise click.ClickException(
            f"several requests begin with {request_id!r}; give more of the name of one:\n  {names}"
        )
    raise click.ClickException(
        f"the daemon at {place} remembers no request {request_id!r} of this tenant. Possible reasons: the engine uses "
        "another id (`tokenlake explain --last 5` shows the newest ones), the engine uses another node, the request is "
        "too long ago, or its prompt has no full segment"
    )


def _print(funnel: Funnel, as_json: bool, prompt: Prompt | None) -> None:
    if as_json:
        click.echo(json.dumps(funnel.plain()))
        return
    rows = [(name, f"{tokens:,}", detail) for name, tokens, detail in _rows(funnel)]
    print_rows(("request", "tokens", ""), rows, f"{funnel.request}, {funnel.age_s:.1f} s ago")
    for line in _parting(funnel, prompt):
        click.echo(line)


def _parting(funnel: Funnel, prompt: Prompt | None) -> Iterator[str]:
    """Sentences that say where the prompt leaves what is known, and whether prompts differ near their beginning."""
    if funnel.leaves_at is not None:
        last = funnel.leaves_at + funnel.segment_tokens - 1
        yield f"the prompt leaves what is known within the tokens {funnel.leaves_at:,} to {last:,}"
        if prompt is not None:
            yield prompt.place(funnel)
    if funnel.alone and funnel.recent > 1:
        yield (
            f"{funnel.alone:,} of the {funnel.recent:,} newest requests begin with a segment that no other one has: "
            f"their prompts differ within the first {funnel.segment_tokens} tokens"
        )
