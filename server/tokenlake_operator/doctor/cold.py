"""The place of the cold tier: whether this machine can write to it and read from it, and how fast."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

from tokenlake.config import ServerConfig
from tokenlake_operator.doctor.base import Finding, refusal
from tokenlake_server.cold.measurement import Measured, probed
from tokenlake_server.cold.places import open_place, require_place
from tokenlake_server.cold.store import READERS, text
from tokenlake_server.cold.upkeep import PATIENCE

LIMIT_S = 20.0
"""Seconds within which the place must have taken some objects and given them back."""
LEAST_RATE = 1.2e9
"""Bytes per second of reads, below which the usual models compute faster than they read."""


def check_cold(config: ServerConfig) -> Iterator[Finding]:
    """Yield findings about the place of the cold tier: it is written to and read from, with the rights of this user."""
    if not config.cold:
        return
    refused = list(refusal("cold", partial(require_place, config.cold)))
    yield from refused
    if not refused:
        yield from _measured(config.cold)
    if not config.tenants:
        problem = "the secret that encrypts its objects is public, because there are no 'tenants'"
        cure = "give the tenant a secret (`[[tenants]]`), or let only the daemons' user read the place"
        yield Finding("warning", "cold-public", f"cold = {config.cold}", problem, cure)


def _measured(where: str) -> Iterator[Finding]:
    found: list[Measured | OSError] = []
    measuring = threading.Thread(target=lambda: found.append(_measure(where)), daemon=True)
    measuring.start()
    measuring.join(LIMIT_S)
    setting = f"cold = {where}"
    if not found:
        problem, cure = f"it does not answer within {LIMIT_S:g} s", "see whether the file server or the bucket serves"
        yield Finding("error", "cold-silent", setting, problem, cure)
    elif isinstance(found[0], OSError):
        cure = "the daemon's user must be able to write there"
        if where.startswith("s3://"):
            cure = "give the bucket, and the variables AWS_ENDPOINT_URL, AWS_REGION and those of the credentials"
        yield Finding("error", "cold", setting, f"it cannot be used: {text(found[0])}", cure)
    elif found[0].read_bytes_per_s < LEAST_RATE:
        problem = f"reads have {found[0].read_bytes_per_s / 1e9:.2f} GB/s: usual models compute most segments faster"
        yield Finding("warning", "cold-slow", setting, problem, "use a faster path to it, or do without it")


def _measure(where: str) -> Measured | OSError:
    try:
        place = open_place(where)
    except OSError as error:
        return error
    try:
        return probed(place, READERS, PATIENCE.probe_bytes)
    except OSError as error:
        return error
    finally:
        place.close()
