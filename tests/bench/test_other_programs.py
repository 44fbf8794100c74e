"""The measurement of what other programs use, with processes that work and processes that wait."""

from __future__ import annotations

import os
import subprocess
import sys

from tokenlake_bench.other_programs import OtherPrograms, _busy_s, _own_s

WORK = "import time\nwhile time.process_time() < 0.5: pass\n"


def test_work_of_descendants_is_own() -> None:
    """Of a child that is reaped, and of a grandchild."""
    before = _own_s(os.getpid())
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}], check=True)"
    subprocess.run([sys.executable, "-c", grandchild], check=True)
    assert _own_s(os.getpid()) - before >= 0.5


def test_work_of_another_program_is_not() -> None:
    """A process whose parent has ended belongs to nobody here."""
    measured, before, busy = OtherPrograms(), _own_s(os.getpid()), _busy_s()
    ended, held = os.pipe()
    start = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {WORK!r}], start_new_session=True, pass_fds=[{held}])"
    )
    subprocess.run([sys.executable, "-c", start], check=True, pass_fds=[held])
    os.close(held)
    assert os.read(ended, 1) == b"", "the end of the last process that has the other end"
    os.close(ended)
    own, all_programs = _own_s(os.getpid()) - before, _busy_s() - busy
    assert all_programs - own >= 0.4
    assert measured.share() > 0
