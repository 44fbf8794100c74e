"""Reads the configuration file of a daemon and checks that other users cannot read the secrets in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tokenlake.config import ServerConfig
from tokenlake.config.setting import settings_of
from tokenlake.config.sources import of_toml
from tokenlake.errors import ConfigurationError

__all__ = ["read_config_file", "read_foreign_file"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_config_file(path: Path) -> str:
    """The text of the configuration file, for a daemon. Raises `ConfigurationError` for a file that cannot be read, is
    not TOML, or holds a secret and may be read or written by other users."""
    text, status = _read(path)
    settings = settings_of(ServerConfig)
    given = {name: value for name, value, _ in of_toml(text, str(path))}
    secrets = [name for name, setting in settings.items() if setting.secret and given.get(name)]
    if secrets and status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise _refusal(
            path,
            f"mode 0600, because it sets '{secrets[0]}'; with mode {mode:04o} other users can read or change it: "
            f"chmod 600 {path}",
        )
    if secrets and status.st_uid not in (os.getuid(), 0):
        raise _refusal(path, f"a file of uid {os.getuid()} or of root, because it sets '{secrets[0]}'")
    return text


def read_foreign_file(path: Path) -> str:
    """The text of a configuration file, for a command that only needs the daemon's addresses. Raises
    `ConfigurationError` for a file that cannot be read."""
    return _read(path)[0]


def _read(path: Path) -> tuple[str, os.stat_result]:
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
        return data.decode("utf-8-sig"), status
    except OSError as error:
        raise _refusal(path, f"a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refusal(path, f"text in UTF-8, which line {line} is not") from None


def _refusal(path: Path, expected: str) -> ConfigurationError:
    return ConfigurationError("configuration file", str(path), expected)
