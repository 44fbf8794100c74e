"""Types that several threads decode are prepared when their module is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import msgspec
from {module} import {name} as Type
data = msgspec.{format}.encode({made})
from {module} import {decode} as decode
sys.setswitchinterval(1e-6)
go = threading.Barrier(4)
def run():
    go.wait()
    assert decode(data) is not None
threads = [threading.Thread(target=run) for _ in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


@pytest.mark.parametrize(
    ("module", "name", "format", "made", "decode"),
    [
        ("tokenlake_server.disk.directory", "Identity", "json", "Type(format=2)", "_decoded"),
        ("tokenlake_server.start.standing_orders", "_Content", "msgpack", "Type(1)", "_DECODER.decode"),
    ],
)
def test_threads_decode_a_type_at_first(module: str, name: str, format: str, made: str, decode: str) -> None:
    """Otherwise msgspec ends the process with SIGSEGV, now and then."""
    script = SCRIPT.format(module=module, name=name, format=format, made=made, decode=decode.partition(".")[0])
    if "." in decode:
        script = script.replace("decode(data)", f"decode.{decode.partition('.')[2]}(data)")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
