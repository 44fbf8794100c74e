"""Run as a script: binds this process to its parent, then becomes a command.

::

    python exec_bound.py PARENT-PID PROGRAM ARGUMENT...

`PR_SET_PDEATHSIG` survives the exec, and the process id stays the same. `children.py` says why it is not set between
fork and exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
FAILED = 127
"""The exit status of a shell that cannot run a command."""


def main() -> None:
    """Raises SystemExit when the parent has ended, OSError when the program cannot run; else does not return."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The signal is sent for a parent that ends from now on. For one that ended before, this process has a new parent.
    if os.getppid() != parent:
        sys.exit(FAILED)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
