"""`tokenlake config`: the settings of a daemon, with their sources, and what they mean for the caches of models."""

from __future__ import annotations

from pathlib import Path

import click

from tokenlake.errors import TokenLakeError
from tokenlake_server.cli import load, with_settings
from tokenlake_server.start import models as known
from tokenlake_server.tables import print_rows


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


@config.command()
@with_settings
def models(file: Path | None, **flags: object) -> None:
    """Print the sizes of segments of known models, and the tokens that the memory holds.

    For each model: the MiB of a segment, those of it that each rank reads with tensor parallelism (TP), the tokens in
    1 GiB, the MiB that each prompt takes besides, and the share of 'memory' that segments use when it is full.
    """
    try:
        memory = load(file, flags).config.memory
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    print_rows(known.COLUMNS, known.rows(memory), known.title(memory))
