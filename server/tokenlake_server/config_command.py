"""`tokenlake config`: the settings of a daemon, with their sources."""

from __future__ import annotations

from pathlib import Path

import click

from tokenlake.errors import TokenLakeError
from tokenlake_server.cli import load, with_settings
from tokenlake_server.tables import print_rows

__all__ = ["config"]


@click.group()
def config() -> None:
    """Show the settings."""


@config.command()
@with_settings
def show(file: Path | None, **flags: object) -> None:
    """Print each setting, its value and its source."""
    try:
        settings = load(file, flags)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    print_rows(("setting", "value", "source"), settings.describe())
    if settings.ignored:
        click.echo(f"variables of a Kubernetes Service, which are not settings: {', '.join(settings.ignored)}")
