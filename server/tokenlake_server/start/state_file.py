"""The file that keeps a node's eviction statistics over a restart of its daemon.

::

    | magic, version | digest of the rest, 16 bytes | bytes of `NodeCore.learned` |

A new file is written beside the old one and then renamed over it, so that a daemon that is killed while it writes
leaves a whole file. A file that is damaged or of another version is not used; the next save replaces it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from tokenlake.core.cluster.learned import MAX_LEARNED_BYTES
from tokenlake.errors import ConfigurationError
from tokenlake_server.start.private_file import open_private

log = logging.getLogger(__name__)

_MAGIC = b"tokenlake learned 1\n"
_DIGEST_BYTES = 16


class StateFile:
    """The file `learned-NODE` in a directory that exists. A failure to save is logged once and has no other effect."""

    def __init__(self, directory: Path, node: str) -> None:
        self.path = directory / f"learned-{node}"
        self._written = b""
        self._complained = False

    def load(self) -> bytes | None:
        """The eviction statistics that were saved last; None where there is no file, or it is not valid."""
        try:
            with self.path.open("rb") as file:
                data = file.read(len(_MAGIC) + _DIGEST_BYTES + MAX_LEARNED_BYTES + 1)
        except FileNotFoundError:
            log.info("no eviction statistics of an earlier daemon: there is no file %s", self.path)
            return None
        except OSError as error:
            log.warning("eviction statistics cannot be read from %s: %s", self.path, error.strerror)
            return None
        magic, digest = data[: len(_MAGIC)], data[len(_MAGIC) :][:_DIGEST_BYTES]
        learned = data[len(_MAGIC) + _DIGEST_BYTES :]
        if magic != _MAGIC or digest != _digest(learned) or len(learned) > MAX_LEARNED_BYTES:
            log.warning("eviction statistics are not used: %s is damaged, or of another version", self.path)
            return None
        log.info("continues with %d bytes of eviction statistics from %s", len(learned), self.path)
        return learned

    def save(self, learned: bytes) -> None:
        """Write the eviction statistics `learned` to the file, unless they are the ones that were saved last. For one
        thread at a time."""
        if learned == self._written:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            with open_private(fresh) as file:
                file.write(_MAGIC + _digest(learned) + learned)
            fresh.replace(self.path)
        except OSError as error:
            if not self._complained:
                log.warning("eviction statistics cannot be saved to %s: %s", self.path, error.strerror)
            self._complained = True
            return
        self._written, self._complained = learned, False


def require_directory(setting: str, path: str) -> None:
    """Raise `ConfigurationError` unless `path` is a directory in which this process may create files."""
    if not os.path.isdir(path):
        raise ConfigurationError(setting, path, "a directory that exists; create it, or leave the setting out")
    try:
        # `os.access` would let root pass for a directory such as /proc.
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError:
        raise ConfigurationError(setting, path, f"a directory that uid {os.getuid()} may write to") from None


def _digest(learned: bytes) -> bytes:
    return hashlib.blake2b(learned, digest_size=_DIGEST_BYTES).digest()
