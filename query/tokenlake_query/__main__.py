"""`python -m tokenlake_query --channel FD`: the program that a daemon with `query_engine` on starts."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys

import torch

from tokenlake_query.daemon_channel import DaemonChannel, die_with_parent
from tokenlake_query.process import QueryEngineProcess

SWITCH_S = 0.0005
"""The interpreter takes the lock from a thread in Python code after this time, so that a reading thread gets a turn
while other threads run."""


def main() -> None:
    """Serve until the channel ends."""
    parser = argparse.ArgumentParser(prog="tokenlake_query", description="The query engine of a TokenLake daemon.")
    parser.add_argument("--channel", type=int, required=True, help="inherited descriptor of a Unix stream socket")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute; 0: half of the cores")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s query: %(message)s")
    die_with_parent()
    # Ctrl-C in a terminal reaches the whole process group: the daemon handles it, and this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(arguments.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    sys.setswitchinterval(SWITCH_S)
    process = QueryEngineProcess(DaemonChannel(arguments.channel))
    gc.collect()
    gc.freeze()
    process.run()


if __name__ == "__main__":
    main()
