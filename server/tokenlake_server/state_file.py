"""What a node learned, in a file that outlives its daemon.

::

    | magic, version | digest of the rest, 16 bytes | what `NodeCore.learned` gave |

Written beside the former one and put in its place at once, so that a daemon that is killed meanwhile leaves a whole
file. One that is damaged, or is another version's, is left alone until the next is written; the node learns anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from tokenlake.core.learned import MAX_LEARNED_BYTES
from tokenlake.errors import ConfigurationError

__all__ = ["StateFile", "require_directory"]

log = logging.getLogger(__name__)

_MAGIC = b"tokenlake learned 1\n"
_DIGEST_BYTES = 16


class StateFile:
    """`learned-NODE` in a directory that is there. Failures are logged once, and otherwise harmless."""

    def __init__(self, directory: Path, node: str) -> None:
        self.path = directory / f"learned-{node}"
        self._written = b""
        self._complained = False

    def load(self) -> bytes | None:
        """What was saved last; None where there is nothing, or nothing whole."""
        try:
            with self.path.open("rb") as file:
                data = file.read(len(_MAGIC) + _DIGEST_BYTES + MAX_LEARNED_BYTES + 1)
        except FileNotFoundError:
            log.info("nothing was learned before: there is no %s", self.path)
            return None
        except OSError as error:
            log.warning("what was learned before cannot be read from %s: %s", self.path, error.strerror)
            return None
        magic, digest = data[: len(_MAGIC)], data[len(_MAGIC) :][:_DIGEST_BYTES]
        learned = data[len(_MAGIC) + _DIGEST_BYTES :]
        if magic != _MAGIC or digest != _digest(learned) or len(learned) > MAX_LEARNED_BYTES:
            log.warning("what was learned before is not used: %s is damaged, or of another version", self.path)
            return None
        log.info("goes on with %d bytes learned before, from %s", len(learned), self.path)
        return learned

    def save(self, learned: bytes) -> None:
        """From any thread, one at a time; nothing is written when nothing changed."""
        if learned == self._written:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.write_bytes(_MAGIC + _digest(learned) + learned)
            fresh.replace(self.path)
        except OSError as error:
            if not self._complained:
                log.warning("what was learned cannot be saved to %s: %s", self.path, error.strerror)
            self._complained = True
            return
        self._written, self._complained = learned, False


def require_directory(setting: str, path: str) -> None:
    """Raise `ConfigurationError` unless `path` is a directory in which this process may make files."""
    if not os.path.isdir(path):
        raise ConfigurationError(setting, path, "a directory that exists; create it, or leave the setting out")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(setting, path, f"a directory that uid {os.getuid()} may write to")


def _digest(learned: bytes) -> bytes:
    return hashlib.blake2b(learned, digest_size=_DIGEST_BYTES).digest()
