"""`tokenlake warm`, `pin` and `unpin`: prompts are brought to nodes before requests come, and kept there for a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from tokenlake.errors import TokenLakeError
from tokenlake.hints import MAX_PIN_S
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.prompts import Prompts, with_prompts
from tokenlake_operator.reaching import Target, one_line, operates
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.tables import print_rows, printable

OUTCOMES = ("here", "missing", "lost", "refused")


def _places(command: Callable[..., Any]) -> Callable[..., Any]:
    to = click.option("--to", multiple=True, help="Name of a node; may be repeated. Default: the node that is asked.")
    everywhere = click.option("--everywhere", is_flag=True, help="All nodes that can be asked.")
    tenant = click.option("--tenant", default="", help="Name of the tenant; needed where the daemon has several.")
    return to(everywhere(tenant(command)))


@click.command()
@with_prompts
@_places
@click.option("--from", "source", default="", help="Name of the node that is asked first for the segments.")
@operates
def warm(
    target: Target,
    prompts: Prompts | None,
    to: tuple[str, ...],
    everywhere: bool,
    tenant: str,
    source: str,
    as_json: bool,
) -> None:
    """Bring prompts to the memory of nodes before requests come, or say what is missing.

    Segments that no node has are missing: a request computes them. The status is 1 unless all segments are there.
    """
    _bring(target, prompts, to, everywhere, tenant, source, 0.0, as_json)


@click.command()
@with_prompts
@_places
@click.option("--from", "source", default="", help="Name of the node that is asked first for the segments.")
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(1.0, MAX_PIN_S),
    default=3600.0,
    show_default=True,
    help="Seconds for which the segments are pinned.",
)
@operates
def pin(
    target: Target,
    prompts: Prompts | None,
    to: tuple[str, ...],
    everywhere: bool,
    tenant: str,
    source: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Bring prompts to the memory of nodes and pin them there: requests for other prompts do not evict them.

    The pins of a tenant keep at most the share `pinned_share` of its memory; further segments are refused. A pin ends
    with its time, by `tokenlake unpin`, and with the daemon. The status is 1 unless all segments are pinned.
    """
    _bring(target, prompts, to, everywhere, tenant, source, seconds, as_json)


@click.command()
@with_prompts
@_places
@click.option("--all", "everything", is_flag=True, help="End all pins of the tenant.")
@operates
def unpin(
    target: Target,
    prompts: Prompts | None,
    to: tuple[str, ...],
    everywhere: bool,
    tenant: str,
    everything: bool,
    as_json: bool,
) -> None:
    """End the pins of prompts, or all of a tenant. The segments stay until memory is needed."""
    if everything == (prompts is not None):
        raise click.UsageError("expected either prompts or --all")

    def ask(node: Node) -> int:
        if prompts is None:
            return node.control.unpin(pb.UnpinRequest(tenant=tenant))
        layout, messages = prompts.messages(_layouts(node, tenant))
        asked = (
            pb.UnpinRequest(prompt=each, segment_tokens=layout.segment_tokens, tenant=tenant)
            for each in messages.values()
        )
        return sum(map(node.control.unpin, asked))

    unpinned, failed = _at(target, to, everywhere, ask)
    if as_json:
        click.echo(json.dumps({"unpinned": unpinned, "failed": failed}))
    else:
        for name, count in unpinned.items():
            click.echo(f"{name}: {count} {'segment' if count == 1 else 'segments'} unpinned")
    _end(failed)


def _bring(
    target: Target,
    prompts: Prompts | None,
    to: tuple[str, ...],
    everywhere: bool,
    tenant: str,
    source: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Bring prompts to nodes, pin them for `seconds` unless that is 0, and print what is there."""
    if prompts is None:
        raise click.UsageError("expected prompts: --tokens, --text or --prompts")

    def ask(node: Node) -> dict[str, dict[str, int]]:
        layout, messages = prompts.messages(_layouts(node, tenant))
        found = {}
        for name, each in messages.items():
            answer = node.control.prefetch(pb.PrefetchRequest(prompt=each, source=source, pin_s=seconds, tenant=tenant))
            found[name] = {outcome: int(getattr(answer, outcome)) for outcome in OUTCOMES}
            found[name]["prefix_tokens"] = answer.prefix * layout.segment_tokens
        return found

    answers, failed = _at(target, to, everywhere, ask)
    if as_json:
        click.echo(json.dumps({"nodes": answers, "failed": failed}))
    else:
        rows = [
            [node, printable(name), *(str(counts[outcome]) for outcome in OUTCOMES), f"{counts['prefix_tokens']:,}"]
            for node, found in answers.items()
            for name, counts in found.items()
        ]
        print_rows(["node", "prompt", *OUTCOMES, "tokens from the first on"], rows)
    _end(failed)
    if any(counts[outcome] for found in answers.values() for counts in found.values() for outcome in OUTCOMES[1:]):
        raise SystemExit(1)


def _layouts(node: Node, tenant: str) -> Sequence[pb.Layout]:
    """The layouts of the tenant's engines at a node."""
    if not tenant:
        return node.control.layouts()
    return [each.layout for each in node.control.engines() if each.tenant == tenant]


def _at(
    target: Target, to: tuple[str, ...], everywhere: bool, ask: Callable[[Node], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What `ask` returns at each chosen node, and the errors of the others, by name."""
    answers: dict[str, Any] = {}
    with reach_all(target, alone=not (to or everywhere)) as (nodes, silent):
        chosen = [node for node in nodes if not to or node.name in to]
        failed = {name: reason for name, reason in silent.items() if not to or name in to}
        known = {node.name for node in nodes} | silent.keys()
        failed |= {name: "it is no member of the cluster" for name in to if name not in known}
        for node in chosen:
            try:
                answers[node.name] = ask(node)
            except (TokenLakeError, click.ClickException) as error:
                failed[node.name] = one_line(error) if isinstance(error, TokenLakeError) else error.message
    return answers, failed


def _end(failed: dict[str, str]) -> None:
    if failed:
        raise click.ClickException("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
