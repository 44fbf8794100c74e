"""The page over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Got(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def get(port: int, path: str = "/page.json", token: str | None = None, method: str = "GET", **headers: str) -> Got:
    """Ask the metrics port of this machine. `headers`: with underscores for dashes."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Got(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Got(error.code, dict(error.headers), error.read())
