"""Runs the checks: `python -m tokenlake_bench.gpu`."""

import sys

from tokenlake_bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
