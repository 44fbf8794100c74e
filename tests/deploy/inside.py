"""Becomes process 1 of a container, as a runtime of Kubernetes makes it of a pod's specification.

Run as root in new namespaces of mounts and processes, with a JSON object as its argument:

- `root`: a directory, which becomes the root directory: empty but for what follows, and read-only;
- `programs`: directories that are mounted at their own paths;
- `binds`: pairs of a directory and the path at which it is mounted; `memory`: paths with a file system in memory;
- `hosts`: the content of /etc/hosts;
- `command` and `environment`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
DEVICES = ("null", "zero", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    given = [word.encode() or None for word in (source, str(target), kind)]
    if _libc.mount(*given, ctypes.c_ulong(flags), data.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount of {source} at {target}")


def _bind(source: str, target: Path) -> None:
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(source, target, flags=MS_BIND | MS_REC)


def main(wanted: dict[str, Any]) -> None:
    os.umask(0o022)
    _mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
    root = Path(wanted["root"])
    _mount("tmpfs", root, "tmpfs", data="mode=0755")

    def inside(path: str) -> Path:
        return root / path.lstrip("/")

    for path in SYSTEM:
        if os.path.islink(path):
            inside(path).symlink_to(os.readlink(path))
        elif os.path.isdir(path):
            _bind(path, inside(path))
    for name in DEVICES:
        _bind(f"/dev/{name}", inside(f"/dev/{name}"))
    for path in ("/proc", "/tmp", "/etc", "/sys/fs/cgroup"):
        inside(path).mkdir(parents=True, exist_ok=True)
    _bind("/sys/fs/cgroup", inside("/sys/fs/cgroup"))
    _mount("proc", inside("/proc"), "proc")
    inside("/etc/hosts").write_text(wanted["hosts"])
    inside("/etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for path in wanted["memory"]:
        inside(path).mkdir(parents=True, exist_ok=True)
        _mount("tmpfs", inside(path), "tmpfs", data="mode=1777")
    for source, path in wanted["binds"]:
        _bind(source, inside(path))
    # Behind the volumes, since a checkout may be below /tmp.
    for path in wanted["programs"]:
        _bind(path, inside(path))
    _mount("none", root, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    os.chroot(root)
    os.chdir("/")
    os.execvpe(wanted["command"][0], wanted["command"], wanted["environment"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
