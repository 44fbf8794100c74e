"""The page over HTTP: its files, which everybody may read, and its JSON, which needs a token.

The files load nothing from elsewhere and have no script or style between their tags, so that the policy below forbids
all else. Texts of the JSON reach the document as texts only: the policy also forbids the functions that parse HTML.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple, Protocol

from tokenlake.errors import CredentialRefused, TokenLakeError

MAX_AT_ONCE = 16
"""Limit of the requests for the page that are served at the same time, half of those of the port: the health pages
and the metrics stay."""
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("X-Frame-Options", "DENY"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
]
DATA = "/page.json"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
PATHS = frozenset([DATA, *FILES])
WITHOUT_CONTROL = (
    "this daemon has no control plane, which grants the page: its settings 'control_socket' and 'control' are empty"
)


class Reply(NamedTuple):
    """The answer to a request."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


class _Answer(Protocol):
    @property
    def body(self) -> bytes: ...

    @property
    def left_s(self) -> float: ...


class Source(Protocol):
    """Makes the JSON (`page.Page`)."""

    def read(self, token: str) -> _Answer:
        """The compressed JSON that this token may read, and the seconds for which the token is still valid. Raises
        `CredentialRefused`, `TokenLakeError`, TimeoutError."""
        ...


class _File(NamedTuple):
    kind: str
    content: bytes
    compressed: bytes
    tag: str


class _Body(list[bytes]):
    """The only block of an answer. The server calls `close` once when the answer is sent, or will not be."""

    def __init__(self, body: bytes, close: Callable[[], None]) -> None:
        super().__init__([body])
        self.close = close


class PageServer:
    """Answers requests for the page. May be used by several threads."""

    def __init__(self) -> None:
        directory = resources.files(__package__).joinpath("static")
        self._files = {path: _file(directory.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._room = threading.BoundedSemaphore(MAX_AT_ONCE)
        self.source: Source | None = None
        """None where the daemon has no control plane."""

    def serve(self, environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """The answer to a GET of one of `PATHS`, as a WSGI application. The request takes room until the reader has
        read the answer, or is given up."""
        if not self._room.acquire(blocking=False):
            error = f"more than {MAX_AT_ONCE} requests for the page at the same time"
            reply = _failed("503 Service Unavailable", error)
            start_response(reply.status, reply.headers)
            return [reply.body]
        try:
            path = environ["PATH_INFO"] or "/"
            reply = self._data(environ) if path == DATA else _of_file(self._files[path], environ)
            start_response(reply.status, reply.headers)
        except BaseException:
            self._room.release()
            raise
        return _Body(reply.body, self._room.release)

    def _data(self, environ: Mapping[str, Any]) -> Reply:
        if self.source is None:
            return _failed("503 Service Unavailable", WITHOUT_CONTROL)
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return _refused("no token was given; `tokenlake page` prints an address with one")
        try:
            answer = self.source.read(token.strip())
        except CredentialRefused as error:
            return _refused(f"{error}; `tokenlake page` prints an address with a new one")
        except TimeoutError:
            return _failed("503 Service Unavailable", "the daemon did not make the page in time")
        except TokenLakeError as error:
            return _failed("503 Service Unavailable", str(error))
        headers = [
            ("Content-Type", "application/json"),
            ("Cache-Control", "no-store"),
            ("Vary", "Authorization, Accept-Encoding"),
            ("Token-Expires-In", f"{answer.left_s:.0f}"),
            *HEADERS,
        ]
        if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            return Reply("200 OK", [*headers, ("Content-Encoding", "gzip")], answer.body)
        return Reply("200 OK", headers, gzip.decompress(answer.body))


def _file(content: bytes, kind: str) -> _File:
    tag = hashlib.blake2b(content, digest_size=12).hexdigest()
    return _File(kind, content, gzip.compress(content, 9, mtime=0), f'"{tag}"')


def _of_file(file: _File, environ: Mapping[str, Any]) -> Reply:
    headers = [("Cache-Control", "no-cache"), ("ETag", file.tag), ("Vary", "Accept-Encoding"), *HEADERS]
    # A proxy that compresses what it forwards makes the tag a weak one.
    if file.tag in environ.get("HTTP_IF_NONE_MATCH", ""):
        return Reply("304 Not Modified", headers, b"")
    headers.append(("Content-Type", file.kind))
    if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
        return Reply("200 OK", [*headers, ("Content-Encoding", "gzip")], file.compressed)
    return Reply("200 OK", headers, file.content)


def _failed(status: str, error: str) -> Reply:
    headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store"), *HEADERS]
    return Reply(status, headers, json.dumps({"error": error}).encode() + b"\n")


def _refused(error: str) -> Reply:
    reply = _failed("401 Unauthorized", error)
    reply.headers.append(("WWW-Authenticate", "Bearer"))
    return reply
