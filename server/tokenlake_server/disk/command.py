"""`tokenlake disk`: looks at a directory of the disk tier, verifies what lies there, and removes it."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tokenlake.disk.places import stride
from tokenlake.errors import TokenLakeError
from tokenlake_server.cli import load
from tokenlake_server.disk.check import THREADS
from tokenlake_server.disk.directory import (
    FORMAT,
    Identity,
    SurveyedSlab,
    aside_names,
    orders_names,
    own_names,
    read_identity,
    survey,
)
from tokenlake_server.disk.encryption import DiskKeys
from tokenlake_server.disk.files import DirectoryFiles, DirectoryInUse, File
from tokenlake_server.disk.segments import Mismatch, SegmentIO, StoredSegment, aligned_memory
from tokenlake_server.disk.table import BLOCK_BYTES
from tokenlake_server.tables import print_rows

_path = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
ATTEMPTS = 5
"""Attempts to read tables of which a running daemon removes one meanwhile."""


@click.group()
def disk() -> None:
    """Look at a directory of the disk tier, verify it, or remove it."""


@disk.command("inspect")
@_path
@_json
def inspect_command(path: Path, as_json: bool) -> None:
    """Show whose directory PATH is, and its segments by tenant and slot size, also while a daemon uses it."""
    with _opened(path, lock=False) as files:
        identity = _identity(files, path)
        slabs = _survey(files)
        rows = [_row(files, each) for each in slabs]
        aside = {name: _size(files, name) for name in aside_names(files)}
        table_bytes = sum(_size(files, name) for name in own_names(files) if name.startswith("table-"))
    if as_json:
        answer = {
            "identity": msgspec.to_builtins(identity),
            "slabs": rows,
            "table_bytes": table_bytes,
            "kept_aside": aside,
        }
        click.echo(json.dumps(answer))
        return
    encrypted = "encrypted" if identity.encrypted else "not encrypted"
    title = f"{path}: format {identity.format}, cluster {identity.cluster}, node {identity.node}, {encrypted}"
    columns = ("tenant", "slot bytes", "segments", "MiB in use", "MiB of the file", "keys")
    shown = [
        (
            str(row["tenant"]),
            f"{row['slot_bytes']:,}",
            f"{row['segments']:,}",
            f"{int(row['used_bytes']) / (1 << 20):,.1f}",
            f"{int(row['file_bytes']) / (1 << 20):,.1f}",
            ", ".join(f"{key}: {count:,}" for key, count in row["keys"].items()),
        )
        for row in rows
    ]
    print_rows(columns, shown, title)
    click.echo(f"tables: {table_bytes / (1 << 20):,.1f} MiB")
    if aside:
        click.echo(
            f"kept aside: {len(aside)} files, {sum(aside.values()) / (1 << 20):,.1f} MiB "
            f"(`tokenlake disk wipe --aside {path}` removes them)"
        )


@disk.command("verify")
@_path
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="A TOML file with `disk_keys`.")
@_json
def verify_command(path: Path, file: Path | None, as_json: bool) -> None:
    """Read every segment in PATH and compare it with its checksums; exit status 1 where one differs. The daemon must
    not run. The keys of encrypted segments come from --config or the environment."""
    try:
        keys = DiskKeys(load(file, {}).config.disk_keys)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    with _opened(path, lock=False) as files:
        _identity(files, path)
    with _opened(path, lock=True) as files:
        slabs = _survey(files)
        counts = Counter[str]()
        first = ""
        with _progress(sum(len(each.stored) * stride(each.slab.slot_bytes) for each in slabs)) as advance:
            for where, problem in _verified(files, slabs, keys, advance):
                counts["differ" if problem else "sound"] += 1
                if problem and not first:
                    first = f"place {where.slot} of tenant '{where.tenant}', {where.slot_bytes} bytes: {problem}"
    if as_json:
        click.echo(json.dumps({"sound": counts["sound"], "differ": counts["differ"], "first": first}))
    else:
        click.echo(f"{counts['sound']:,} segments are sound, {counts['differ']:,} are not and would be misses")
        if first:
            click.echo(f"the first: {first}")
    if counts["differ"]:
        raise SystemExit(1)


@disk.command("wipe")
@_path
@click.option("--aside", is_flag=True, help="Only the files that were kept aside.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def wipe_command(path: Path, aside: bool, yes: bool) -> None:
    """Remove all files of the disk tier from PATH; other files stay. The daemon must not run."""
    with _opened(path, lock=False) as files:
        # Without the lock, which would create a file that belongs to this user.
        if not aside_names(files) + ([] if aside else _all_names(files)):
            click.echo(f"{path} has no such files")
            return
    with _opened(path, lock=True) as files:
        names = aside_names(files) + ([] if aside else _all_names(files))
        nbytes = sum(_size(files, name) for name in names)
        if not yes:
            click.confirm(f"Remove {len(names)} files, {nbytes / (1 << 20):,.1f} MiB, from {path}?", abort=True)
        for name in names:
            files.remove(name)
        files.sync_names()
    click.echo(f"removed {len(names)} files, {nbytes / (1 << 20):,.1f} MiB")


def _all_names(files: DirectoryFiles) -> list[str]:
    """The files of the tier in use. The orders go first: without the segments they are for none."""
    return orders_names(files) + own_names(files)


@contextmanager
def _opened(path: Path, *, lock: bool) -> Iterator[DirectoryFiles]:
    try:
        files = DirectoryFiles(path, lock=lock)
        try:
            yield files
        finally:
            files.close()
    except DirectoryInUse as process:
        raise click.ClickException(f"{path} is in use by {process}; stop the daemon first") from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or path}: {error.strerror or error}") from error


def _identity(files: DirectoryFiles, path: Path) -> Identity:
    identity = read_identity(files)
    if identity is None:
        raise click.ClickException(f"{path} is no directory of a disk tier: it has no whole tokenlake-disk.json")
    if identity.format != FORMAT:
        raise click.ClickException(f"{path} has format {identity.format}; this version reads format {FORMAT}")
    return identity


def _survey(files: DirectoryFiles) -> list[SurveyedSlab]:
    for attempt in itertools.count(1):
        try:
            return survey(files)
        except FileNotFoundError:
            # A running daemon has removed a slab meanwhile.
            if attempt == ATTEMPTS:
                raise
    raise AssertionError


def _size(files: DirectoryFiles, name: str) -> int:
    file = files.open(name)
    try:
        return file.size()
    finally:
        file.close()


def _row(files: DirectoryFiles, each: SurveyedSlab) -> dict[str, Any]:
    numbers, counts = np.unique(each.stored["encryption"], return_counts=True)
    return {
        "tenant": each.slab.tenant,
        "slot_bytes": each.slab.slot_bytes,
        "segments": len(each.stored),
        "used_bytes": len(each.stored) * stride(each.slab.slot_bytes),
        "file_bytes": _size(files, each.name) if each.name in files.names() else 0,
        "keys": {
            f"{number:08x}" if number else "none": count
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        },
    }


def _verified(
    files: DirectoryFiles, slabs: list[SurveyedSlab], keys: DiskKeys, advance: Callable[[int], None]
) -> Iterator[tuple[StoredSegment, str]]:
    """Each segment, and a text about its damage; empty if there is none."""
    kept = threading.local()

    def check(file: File, where: StoredSegment) -> tuple[StoredSegment, str]:
        if not hasattr(kept, "io"):
            kept.io, kept.memory = SegmentIO(keys), {}
        memory = kept.memory.setdefault(where.slot_bytes, aligned_memory(where.slot_bytes))
        try:
            kept.io.read(file, BLOCK_BYTES + where.slot * stride(where.slot_bytes), where, memory)
        except (Mismatch, OSError) as error:
            return where, str(error)
        finally:
            advance(stride(where.slot_bytes))
        return where, ""

    with ThreadPoolExecutor(THREADS) as pool:
        for slab, name, stored in slabs:
            if name not in files.names():
                continue
            file = files.open(name, direct=True)
            try:
                segments = [
                    StoredSegment(
                        slab.tenant,
                        slab.slot_bytes,
                        int(record["shards"]),
                        record["key"].tobytes(),
                        int(record["slot"]),
                        int(record["generation"]),
                    )
                    for record in stored
                ]
                yield from pool.map(lambda where, file=file: check(file, where), segments)
            finally:
                file.close()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
