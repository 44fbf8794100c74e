"""Settings for all tests: the profiles of hypothesis (`tests.profiles`), and asserts that explain themselves.

A failed assert of a helper module shows its values, as one of a test module does.
"""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.profiles import register_profiles
from tokenlake_testing import fork_server

# Before any of them is imported. pytest itself rewrites the asserts of test modules and conftests alone.
pytest.register_assert_rewrite(*(f"tests.{each.name}" for each in Path(__file__).parent.iterdir() if each.is_dir()))

register_profiles()

# Daemons and engines are forked from a process that has imported what they need.
fork_server.use("tests.warm_daemon")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The environments of engines and routers have no pytest-asyncio, and run no test that needs it."""
    if find_spec("pytest_asyncio") is None:
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "a setting of pytest-asyncio")


if not Path("/dev/nvidiactl").exists():
    # Triton reads this variable when any module imports it: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and the processes of tests would inherit it and not end at SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
