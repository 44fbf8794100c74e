"""Reads the configuration file of a daemon and checks that other users cannot read the secrets in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tokenlake.config import ServerConfig
from tokenlake.config.setting import PlainRefusal, settings_of
from tokenlake.config.sources import of_toml

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BEYOND_READING = _OTHERS & ~stat.S_IRGRP


def read_config_file(path: Path) -> str:
    """The text of the configuration file, for a daemon. Raises `PlainRefusal` for a file that cannot be read, or that
    holds a secret and may be read or written by other users; `ConfigurationError` for one that is not TOML. The group
    of the file may read it where root gave it to a group of this process, as Kubernetes does with the files of a Secret
    (`fsGroup`)."""
    text, status = _read(path)
    settings = settings_of(ServerConfig)
    given = {name: value for name, value, _ in of_toml(text, str(path))}
    secrets = [name for name, setting in settings.items() if setting.secret and given.get(name)]
    if secrets and status.st_mode & (_BEYOND_READING if _given_by_root(status) else _OTHERS):
        mode = stat.S_IMODE(status.st_mode)
        problem = f"sets '{secrets[0]}', and with mode {mode:04o} other users can read or change it"
        raise _refusal(path, problem, f"chmod 600 {path}")
    if secrets and status.st_uid not in (os.getuid(), 0):
        problem = f"sets '{secrets[0]}', and belongs to uid {status.st_uid}, who can read and change it"
        raise _refusal(path, problem, f"chown {os.getuid()} {path}")
    return text


def read_foreign_file(path: Path) -> str:
    """The text of a configuration file, for a command that only needs the daemon's addresses. Raises `PlainRefusal` for
    a file that cannot be read."""
    return _read(path)[0]


def _given_by_root(status: os.stat_result) -> bool:
    """True for a file of root that this process, which is not root's, may read through one of its groups only."""
    return status.st_uid == 0 != os.getuid() and status.st_gid in {os.getegid(), *os.getgroups()}


def _read(path: Path) -> tuple[str, os.stat_result]:
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
        return data.decode("utf-8-sig"), status
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror})", "give another path") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refusal(path, f"is not in UTF-8, from line {line} on", "save it in UTF-8") from None


def _refusal(path: Path, problem: str, cure: str) -> PlainRefusal:
    return PlainRefusal("configuration file", f"the configuration file '{path}' {problem}", cure)
