"""Objects in a bucket of S3, or of a service with S3's interface, by the library obstore.

Credentials, region and endpoint come from the usual variables (`AWS_ACCESS_KEY_ID`, `AWS_REGION`, `AWS_ENDPOINT_URL`,
...) or from the machine's role.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tokenlake_server.cold.base import MAX_LISTED, Listed, Missing, Unfit

CONNECT_S = 3.0
REQUEST_S = 60.0
"""Limit of one request; the tier is set aside long before, when nothing comes."""
RETRIES = 2
PART_BYTES = 64 << 20
"""An object above this size is uploaded in parts of it."""
STREAM_BYTES = 1 << 20


class S3Objects:
    """The objects below a prefix of a bucket."""

    poll_s = 5.0
    late_s = 0.0
    """A listing has all objects that were written before."""

    def __init__(self, url: str) -> None:
        """`url`: `s3://BUCKET/PREFIX`. Raises OSError for settings that obstore refuses."""
        bucket = urlsplit(url).netloc
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        with _as_os_error():
            self._store = S3Store(
                bucket,
                prefix=urlsplit(url).path.strip("/") or None,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=2 * CONNECT_S)},
            )

    def read(self, path: str) -> _StreamReader:
        with _as_os_error(read=path):
            found = obstore.get(self._store, path)
            return _StreamReader(found.stream(min_chunk_size=STREAM_BYTES), found.meta["size"])

    def write(self, path: str, parts: Iterator[memoryview], nbytes: int) -> None:
        room = bytearray(nbytes)
        at = 0
        for part in parts:
            room[at : at + len(part)] = part
            at += len(part)
        with _as_os_error():
            obstore.put(self._store, path, room, use_multipart=nbytes > PART_BYTES, chunk_size=PART_BYTES)

    def delete(self, paths: Sequence[str]) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, list(paths))

    def list(self, folder: str) -> Iterator[Listed]:
        count = 0
        with _as_os_error():
            for some in obstore.list(self._store, f"{folder}/"):
                for each in some:
                    count += 1
                    if count > MAX_LISTED:
                        return
                    if "/" not in each["path"].removeprefix(f"{folder}/"):
                        yield Listed(each["path"], each["size"], each["last_modified"].timestamp())

    def require(self) -> None:
        with _as_os_error():
            for _ in obstore.list(self._store, "index/", chunk_size=1):
                return

    def close(self) -> None:
        """Nothing is to be released."""


class _StreamReader:
    def __init__(self, chunks: Any, nbytes: int) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")
        self.nbytes = nbytes

    def read(self, room: memoryview) -> None:
        while room:
            if not self._rest:
                with _as_os_error():
                    chunk = next(self._chunks, None)
                if chunk is None:
                    raise Unfit("it ends before it should")
                self._rest = memoryview(chunk).cast("B")
            some = min(len(room), len(self._rest))
            room[:some] = self._rest[:some]
            room, self._rest = room[some:], self._rest[some:]

    def close(self) -> None:
        self._chunks = iter(())
        self._rest = memoryview(b"")


@contextlib.contextmanager
def _as_os_error(*, read: str = "") -> Iterator[None]:
    """Raise OSError in place of obstore's errors. `read`: the path of an object that is read: `Missing` where it is not
    there."""
    try:
        yield
    except FileNotFoundError as error:
        if read:
            raise Missing(read) from None
        raise OSError(errno.ENOENT, _first_line(error)) from None
    except (BaseError, ValueError) as error:
        raise OSError(errno.EIO, _first_line(error)) from None


def _first_line(error: Exception) -> str:
    """What obstore says, without its report of the retries and of the source. It names no credential."""
    return " ".join(str(error).split("\n\n")[0].split())[:300]
