"""The property tests of this package under atheris, without a limit of time: `python -m tests.fuzz.atheris_run`.

Each test that hypothesis drives is a target: atheris feeds its `fuzz_one_input`, guided by the lines of tokenlake that
an input reaches. One process per target, since libFuzzer ends the process. Exit status 1 when a target failed; the
input that made it fail lies in the directory of `--artifacts`. Needs the extra `fuzz`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

MODULES = ("tests.fuzz.test_core", "tests.fuzz.test_decoders", "tests.fuzz.test_inputs")
PACKAGES = ["tokenlake", "tokenlake_client", "tokenlake_server"]
EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
GRACE_S = 120
"""The time for the imports, which are instrumented, and for the last input."""


def targets() -> list[str]:
    """`module:test`, or `module:test:index` for each value of a parametrised test, which draws the rest as `data`."""
    found: list[str] = []
    for module in MODULES:
        for name, test in vars(importlib.import_module(module)).items():
            if hasattr(test, "hypothesis"):
                marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
                count = len(list(marks[0].args[1])) if marks else 0
                found += [f"{module}:{name}:{index}" for index in range(count)] or [f"{module}:{name}"]
    return found


def fuzz(target: str, arguments: list[str]) -> None:
    """Run one target in this process, and end the process."""
    import atheris
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    with atheris.instrument_imports(include=PACKAGES):
        for name in (
            "tokenlake.core",
            "tokenlake.config",
            "tokenlake_server.peers.handshake",
            "tokenlake_testing.event_log",
        ):
            importlib.import_module(name)
    module, name, *index = target.split(":")
    test = vars(importlib.import_module(module))[name]
    if index:
        (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        inner, argument = test.hypothesis.inner_test, mark.args[0]
        value = list(mark.args[1])[int(index[0])]
        test = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))(
            given(data=st.data())(lambda data: inner(**{argument: value}, data=data))
        )
    atheris.Setup([sys.argv[0], *arguments], test.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="in all, shared evenly by the targets")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--artifacts", type=Path, default=Path("fuzz-artifacts"))
    parser.add_argument("--target", help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    if known.target:
        fuzz(known.target, rest)
    chosen = [target for target in targets() if known.only in target]
    each = max(1, known.seconds // max(1, len(chosen)))
    known.artifacts.mkdir(parents=True, exist_ok=True)
    total = failed = 0
    for target in chosen:
        command = [sys.executable, "-m", "tests.fuzz.atheris_run", "--target", target, f"-max_total_time={each}"]
        command += ["-max_len=4096", "-print_final_stats=1", f"-artifact_prefix={known.artifacts}/"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=each + GRACE_S)
        counted = EXECUTED.search(done.stderr)
        runs = int(counted[1]) if counted else 0
        total += runs
        failed += done.returncode != 0
        print(f"{target}: {runs} executions{'' if done.returncode == 0 else ', FAILED'}", flush=True)
        if done.returncode:
            print(done.stdout[-4000:] + done.stderr[-8000:], flush=True)
    print(f"{len(chosen)} targets, {total} executions, {failed} failed")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
