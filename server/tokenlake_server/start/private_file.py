"""Files that only the daemon's user may read or write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """Open an empty file for writing, with mode 0600 whatever the umask is. A file that exists is emptied and gets that
    mode. Raises OSError, also where the file belongs to another user."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "wb", buffering, opener=opened)
