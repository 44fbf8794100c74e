"""`tokenlake cold`: what is in a cold tier, whether it is sound, and its expiry. The commands read the place itself,
and need no daemon."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from tokenlake.config import ServerConfig, format_size, parse_size
from tokenlake.errors import TokenLakeError
from tokenlake_server.cli import load
from tokenlake_server.cold.catalogue import Catalogue, Clock
from tokenlake_server.cold.index import Index
from tokenlake_server.cold.names import ColdTenant
from tokenlake_server.cold.places import Place, open_place, require_module
from tokenlake_server.cold.store import text
from tokenlake_server.cold.survey import ages, groups, verified
from tokenlake_server.cold.upkeep import PATIENCE, Erasures, Upkeep
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.tables import print_rows

SAMPLE = 100
SHOWN = 20
"""Damaged objects that are named."""
DAMAGED = 1
"""The exit status where an object is damaged."""


class Opened(NamedTuple):
    """A place, and its index as it is now."""

    config: ServerConfig
    place: Place
    catalogue: Catalogue
    tenants: dict[str, ColdTenant]


@click.group()
def cold() -> None:
    """Look into the cold tier, verify it, and let objects expire."""


def of_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name the place."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one object in JSON."),
        click.option("--cold", default=None, help="The place, in place of the setting `cold`."),
        click.option(
            "--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with the settings."
        ),
    ):
        command = option(command)
    return command


@contextmanager
def opened(file: Path | None, cold: str | None) -> Iterator[Opened]:
    """The place of the settings. Raises `click.ClickException`."""
    try:
        config = load(file, {"cold": cold}).config
        if not config.cold:
            raise click.UsageError("no place is given: give --cold, or --config with the setting 'cold'")
        require_module(config.cold)
        place = open_place(config.cold)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{cold or 'the place'} cannot be used: {text(error)}") from error
    try:
        catalogue = Catalogue(place, Index(), Clock())
        catalogue.poll()
        tenants = {tenant.name: ColdTenant(tenant.secret) for tenant in Tenants(config)}
        yield Opened(config, place, catalogue, tenants)
    except OSError as error:
        raise click.ClickException(f"{config.cold} cannot be used: {text(error)}") from error
    finally:
        place.close()


@cold.command()
@of_place
def inspect(file: Path | None, cold: str | None, as_json: bool) -> None:
    """Print how many objects there are: by tenant and size of a segment, and by their last use.

    Tenants are named whose secret the settings have.
    """
    with opened(file, cold) as found:
        catalogue, totals = found.catalogue, found.catalogue.index.totals
        by_group, by_age = groups(catalogue.index, found.tenants), dict(ages(catalogue))
        seen = catalogue.seen
        if as_json:
            answer = {
                "place": found.config.cold,
                "objects": totals.objects,
                "bytes": totals.nbytes,
                "size": found.config.cold_size,
                "groups": [group._asdict() for group in by_group],
                "last_use": by_age,
                "tables": len(seen.root.tables),
                "journals": len(seen.journals),
                "writers": seen.writers,
                "problem": catalogue.problem,
            }
            click.echo(json.dumps(answer))
            return
        share = 100 * totals.nbytes / found.config.cold_size
        click.echo(
            f"{found.config.cold}: {totals.objects} objects, {totals.nbytes / (1 << 30):.1f} GiB, "
            f"{share:.0f} % of cold_size ({format_size(found.config.cold_size)})"
        )
        click.echo(
            f"index: {catalogue.index.entries} entries in {len(seen.root.tables)} tables and {len(seen.journals)} "
            f"journals that are not merged; {seen.writers} nodes wrote within some minutes"
        )
        if catalogue.problem:
            click.echo(f"problem: {catalogue.problem}")
        print_rows(
            ("tenant", "segment", "objects", "GiB"),
            [
                (each.tenant, format_size(each.slot_bytes), str(each.objects), f"{each.nbytes / (1 << 30):.1f}")
                for each in by_group
            ],
        )
        print_rows(("last use", "objects"), [(age, str(count)) for age, count in by_age.items()])


@cold.command()
@of_place
@click.option("--sample", default=SAMPLE, show_default=True, type=click.IntRange(1), help="Objects to read, by chance.")
@click.option("--all", "everything", is_flag=True, help="Read all objects.")
def verify(file: Path | None, cold: str | None, as_json: bool, sample: int, everything: bool) -> None:
    """Read objects, and compare their bytes with their checksums. Exits with 1 where one is damaged.

    Of tenants whose secret the settings do not have, only heads and sizes are looked at. An object that is missing was
    removed by a node meanwhile, or its name is not forgotten yet; readers take it for a miss.
    """
    with opened(file, cold) as found:
        most = None if everything else sample
        result = verified(found.place, found.catalogue.index, list(found.tenants.values()), most)
        if as_json:
            click.echo(json.dumps(result._asdict()))
        else:
            click.echo(
                f"sound: {result.sound}; of tenants that are not known here: {result.unknown}; missing: "
                f"{result.missing}; damaged: {len(result.damaged)}"
            )
            if result.damaged:
                print_rows(("damaged", "problem"), result.damaged[:SHOWN])
    if result.damaged:
        raise click.exceptions.Exit(DAMAGED)


class _Size(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r} is no size; expected {error}", param, ctx)


@cold.command()
@of_place
@click.option("--days", type=click.FloatRange(0), help="Delete objects that were not used for so many days.")
@click.option("--to-size", type=_Size(), help="Delete the longest unused objects until the others take this size.")
@click.option("--yes", is_flag=True, help="Delete without the question; needed where there is no terminal.")
def expire(
    file: Path | None, cold: str | None, as_json: bool, days: float | None, to_size: int | None, yes: bool
) -> None:
    """Delete objects now: those that were not used for long, or the longest unused ones. Nodes hear of it within
    seconds."""
    if days is None and to_size is None:
        raise click.UsageError("expected --days or --to-size")
    with opened(file, cold) as found:
        index = found.catalogue.index
        keep_s = found.config.cold_days * 86400 if days is None else days * 86400
        if not yes:
            click.confirm(f"Delete objects in {found.config.cold}?", abort=True)
        upkeep = Upkeep(
            found.place, found.catalogue, Erasures(), found.config.cold_size, keep_s, PATIENCE, lambda: True
        )
        deleted = 0
        before = index.totals.nbytes
        while some := upkeep.delete_oldest(0 if to_size is None else max(0, index.totals.nbytes - to_size), keep_s):
            deleted += some
            found.catalogue.flush()
        freed = before - index.totals.nbytes
        if as_json:
            click.echo(json.dumps({"deleted": deleted, "bytes": freed, "objects": index.totals.objects}))
        else:
            click.echo(f"{deleted} objects deleted, {freed / (1 << 30):.1f} GiB; {index.totals.objects} are left")
