"""An engine in a container beside a daemon: `SOCKET store SEED SEGMENTS` or `SOCKET read SEED SEGMENTS`, with an
optional token. Prints the number of segments."""

from __future__ import annotations

import sys

from tests.robustness.live import LAYOUT, PATIENT, Prompt, read, store
from tokenlake import Pool


def main(socket: str, act: str, seed: str, segments: str, token: str = "") -> None:
    """`socket` may be empty."""
    prompt = Prompt(int(seed), int(segments))
    with Pool.connect(socket or None, LAYOUT, token or None, deadlines=PATIENT) as pool:
        print(len(store(pool, prompt)) if act == "store" else read(pool, prompt))


if __name__ == "__main__":
    main(*sys.argv[1:])
