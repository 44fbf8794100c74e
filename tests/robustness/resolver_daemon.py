"""`tokenlake serve` with one more flag, `--hosts FILE`: host names resolve as the JSON file, address by name, says at
the moment."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import click

from tokenlake_server.cli import run_daemon, with_settings


@click.command()
@with_settings
@click.option("--hosts", required=True, type=click.Path(path_type=Path))
def main(file: Path | None, hosts: Path, **flags: object) -> None:
    """Run a daemon with a resolver of its own."""

    async def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (json.loads(hosts.read_text()).get(host, host), port))]

    def made(_: object) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.getaddrinfo = getaddrinfo

    run_daemon(file, flags, made=made)


if __name__ == "__main__":
    main()
