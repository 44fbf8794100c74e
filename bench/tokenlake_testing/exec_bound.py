"""A script that makes the kernel kill its process when the parent ends, and then runs a command in the same process.

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
PARENT_GONE = 1


def bind_to(parent: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends. Raises OSError when the kernel
    refuses, SystemExit when process `parent` has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # If the parent ended before this call, the kernel sends no signal; this process has another parent then and ends
    # here.
    if os.getppid() != parent:
        sys.exit(PARENT_GONE)


if __name__ == "__main__":
    bind_to(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
