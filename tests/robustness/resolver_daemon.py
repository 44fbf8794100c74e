"""`tokenlake serve` with one more flag, `--hosts FILE`: host names resolve as the JSON file, address by name, says at
the moment."""

from __future__ import annotations

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

    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        return resolve(json.loads(hosts.read_text()).get(host, host), *rest, **more)

    socket.getaddrinfo = getaddrinfo
    run_daemon(file, flags)


if __name__ == "__main__":
    main()
