"""Checks that a Python interpreter has the modules that a benchmark needs, before any process is started."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tokenlake.errors import ConfigurationError

ENGINE_MODULES: Final = {
    "vllm": ("vllm", "tokenlake_client", "tokenlake_testing"),
    "transformers": ("torch", "transformers", "tokenlake_client", "tokenlake_testing"),
}
"""By kind of engine, the modules that `check_interpreter` requires of an interpreter: those that an engine process
(`tokenlake_testing.engine_lines`) imports."""
REMEDIES: Final = {
    "vllm": "in the repository `make install-vllm` makes one at .venv-vllm",
    "transformers": "pip install tokenlake-bench 'tokenlake[transformers]'",
}
MISSING: Final = (
    "import sys; from importlib.util import find_spec; print(*(name for name in sys.argv[1:] if not find_spec(name)))"
)


def check_modules(*names: str) -> None:
    """Raises ModuleNotFoundError unless this interpreter has all of these modules. The `tokenlake` command answers that
    error with the command that installs the module."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def check_interpreter(python: str | Path, engine: str) -> None:
    """Check that the interpreter `python` runs and has the modules of `engine`, which is "vllm" or "transformers".
    Raises ConfigurationError if not."""
    command = [str(python), "-c", MISSING, *ENGINE_MODULES[engine]]
    expected = f"an interpreter with {engine} and TokenLake ({REMEDIES[engine]})"
    try:
        missing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError("python", str(python), f"{expected}; it does not run: {error}") from None
    if missing:
        raise ConfigurationError("python", str(python), f"{expected}; it has no {' and no '.join(missing)}")
