"""`tokenlake page`: the address of the page of a node, with a token that expires."""

from __future__ import annotations

import json

import click

from tokenlake.config import Address, is_loopback, parse_address
from tokenlake_operator.reaching import Target, operates
from tokenlake_operator.words import span
from tokenlake_server.page.tokens import DEFAULT_S, MAX_S


@click.command()
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(1.0, MAX_S),
    default=DEFAULT_S,
    show_default=True,
    help="Seconds for which the address is valid.",
)
@click.option("--tenant", default="", help="Name of the only tenant that the page shows.")
@operates
def page(target: Target, seconds: float, tenant: str, as_json: bool) -> None:
    """Print the address of the page of a node for a browser.

    The part behind # is a token, with which the page can be read until it expires or the daemon ends. It shows what you
    may see: all tenants over the control socket or with the role admin, else your own. Behind a proxy, put the part
    behind # after the address of the proxy.
    """
    with target.connect() as control:
        granted = control.grant_page(seconds, tenant)
        if not granted.address:
            raise click.ClickException("the node has no page, because its setting 'metrics' is empty")
    at = parse_address(granted.address)
    shown = _reached(at, target.remote)
    url = f"http://{shown}/#token={granted.token}"
    if as_json:
        click.echo(json.dumps({"url": url, "address": str(shown), "token": granted.token, "valid_s": seconds}))
        return
    click.echo(url)
    click.echo(f"valid for {span(seconds)} at most, and only while this daemon runs; keep it to yourself", err=True)
    if is_loopback(at.host):
        if target.remote is not None:
            there = f"ssh -L {at.port}:{at} {target.remote.host}"
            click.echo(f"the page can be reached on the node's own machine only: `{there}` first", err=True)
    else:
        click.echo("the page is not encrypted: reach it over `ssh -L`, or over a proxy with TLS", err=True)


def _reached(at: Address, remote: Address | None) -> Address:
    """The address to give to a browser, where the daemon listens at `at`."""
    if at.host not in ("0.0.0.0", "::"):
        return at
    return Address("127.0.0.1" if remote is None else remote.host, at.port)
