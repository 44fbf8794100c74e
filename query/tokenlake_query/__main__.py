"""`python -m tokenlake_query --channel FD`: the program that a daemon with `query_engine` on starts."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading

import torch

from tokenlake.log_lines import log_objects, set_up_log
from tokenlake_query.daemon_channel import DaemonChannel, die_with_parent
from tokenlake_query.process import QueryEngineProcess

SWITCH_S = 0.0005
"""For `sys.setswitchinterval`: seconds for which a thread may keep the interpreter lock while other threads wait for
it. Less than Python's default of 5 ms, so that threads that read sockets do not wait long for threads that compute."""


def main() -> None:
    """Run the query engine until the daemon closes its end of `--channel` or dies."""
    parser = argparse.ArgumentParser(prog="tokenlake_query", description="The query engine of a TokenLake daemon.")
    parser.add_argument("--channel", type=int, required=True, help="inherited descriptor of a Unix stream socket")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: half of the cores")
    parser.add_argument("--log-objects-of", default="", metavar="NODE", help="log JSON objects with this node's name")
    arguments = parser.parse_args()
    set_up_log("%(asctime)s %(levelname)s query: %(message)s")
    if arguments.log_objects_of:
        threading.excepthook = log_objects(arguments.log_objects_of)
    die_with_parent()
    # Ctrl-C in a terminal sends SIGINT to the daemon and to this process. Only the daemon handles it; this process
    # exits when the daemon has ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(arguments.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    sys.setswitchinterval(SWITCH_S)
    process = QueryEngineProcess(DaemonChannel(arguments.channel))
    gc.collect()
    gc.freeze()
    process.run()


if __name__ == "__main__":
    main()
